"""`verify_tokens` on a GPU, in two launches that overlap: one measures the target's rows; one takes
the draft law off at each row's first rejected token (not with point masses) and settles the rows.

Legend: B rows, K draft tokens (width), V vocabulary, C chunks of a row.
"""

import triton
import triton.language as tl

from specdec.kernels.triton_decide import Chain, count_valid, decide_tokens, read_draft_tokens
from specdec.kernels.triton_launch import UNWRITTEN, let_next_start, overlap, wait_for_last, write
from specdec.kernels.triton_laws import Laws
from specdec.kernels.triton_residual import Residuals, subtract_span
from specdec.kernels.triton_rows import find_span, measure, new_measures
from specdec.kernels.triton_settle import Outcome, settle_tokens

SPAN = 2  # chunks that a program takes the draft off
REGISTERS = 96  # of a thread


def verify_by_token(
    chain: Chain, laws: Laws, outcome: Outcome, *, block: int, num_warps: int, span: int | None
) -> None:
    """Fills `outcome`; for the options see `triton_verify.verify`."""
    rows, width = chain.tokens.shape
    measures = new_measures(laws.logits, laws.gate, block)
    chunks = measures.chunks
    masses = measures.largest.new_empty(rows, 1, chunks, 2)
    span = span or find_span(rows, chunks, SPAN)
    spans = 0 if chain.probs is None else triton.cdiv(chunks, span)
    sizes = {"width": width, "block": block, "num_warps": num_warps}
    overlapped = overlap(laws.logits)
    _measure_kernel[(chunks, rows, laws.places)](
        chain,
        laws,
        measures,
        masses,
        is_early=overlapped["is_early"],
        threads=32 * num_warps,
        **sizes,
    )
    _settle_kernel[(spans + 1, rows)](
        chain,
        laws,
        measures,
        Residuals(masses, None, None, 1, chunks),
        outcome,
        span,
        rule="chain" if spans else "point",
        padded_places=triton.next_power_of_2(width + 1),
        padded_chunks=triton.next_power_of_2(chunks),
        maxnreg=REGISTERS,
        enable_fp_fusion=False,  # equal laws must subtract to 0
        **sizes,
        **overlapped,
    )


@triton.jit
def _measure_kernel(
    chain,
    laws,
    measures,
    masses,
    is_early: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    threads: tl.constexpr,
):
    # No program divides to find its part: that alone took a tenth of the time. The first places are
    # the last, so that they are in the cache when a token is rejected there, as it mostly is.
    let_next_start(is_early)
    chunk, row = tl.program_id(0), tl.program_id(1)
    place = width - tl.program_id(2)
    if place == 0:
        words = tl.full((2,), UNWRITTEN, tl.int32).to(tl.float32, bitcast=True)
        slot = tl.cast(row, tl.int64) * measures.chunks + chunk
        write(masses + 2 * slot + tl.arange(0, 2), words)
    if place <= count_valid(chain, row, width):
        measure(measures, laws, row, place, chunk, False, block, threads)


@triton.jit
def _settle_kernel(
    chain,
    laws,
    measures,
    residuals,
    outcome,
    span,
    is_early: tl.constexpr,
    rule: tl.constexpr,
    width: tl.constexpr,
    padded_places: tl.constexpr,
    block: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    item, row = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)  # the last measured
    draft = read_draft_tokens(chain, laws, row, rule, width, padded_places)
    wait_for_last(is_early)
    decision = decide_tokens(laws, measures, row, draft, width, padded_places, block, padded_chunks)
    if item == tl.num_programs(0) - 1:
        settle_tokens(
            chain,
            laws,
            measures,
            residuals,
            outcome,
            row,
            draft,
            decision,
            rule,
            width,
            padded_places,
            block,
            padded_chunks,
        )
    elif rule == "chain":
        _subtract(residuals, chain, laws, row, decision, draft[0], item * span, span, block)


@triton.jit
def _subtract(residuals, chain, laws, row, decision, num_valid, first, span, block: tl.constexpr):
    """Takes the draft off a span of chunks at the place of the rejected token, if there is one."""
    place, law, _, _ = decision
    if place < num_valid:
        order = law, tl.full((), 1.0, tl.float32)
        subtract_span(residuals, chain, laws, row, 0, place, order, first, span, block)
