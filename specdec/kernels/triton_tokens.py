"""`verify_tokens` on a GPU, in two launches that overlap: one measures the target's rows; one takes
the draft law off at each row's first rejected token (not with point masses), and the last of a
row's programs settles it.

The programs of the second launch take as much each as lets them all run at once, where the batch
allows, and read their parts one after the other without a pause. What comes behind has the memory
idle, and its instructions too are read from there, so it is short: the draw reads one warp's part
again.

Legend: B rows, K draft tokens (width), V vocabulary, C chunks of a row.
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.triton_decide import Chain, count_valid, decide_tokens, read_draft_tokens
from specdec.kernels.triton_launch import announce, overlap, wait_for_last
from specdec.kernels.triton_laws import Laws
from specdec.kernels.triton_residual import Residuals, subtract_span
from specdec.kernels.triton_rows import find_span, measure, new_measures
from specdec.kernels.triton_settle import Outcome, settle_tokens

SPAN = 4  # chunks that a program takes the draft off, at most
REGISTERS = 128  # of a thread


def verify_by_token(
    chain: Chain, laws: Laws, outcome: Outcome, *, block: int, num_warps: int, span: int | None
) -> None:
    """Fills `outcome`; for the options see `triton_verify.verify`."""
    rows, width = chain.tokens.shape
    measures = new_measures(laws.logits, laws.gate, block)
    chunks = measures.chunks
    masses = measures.largest.new_empty(rows, 1, 2, chunks * num_warps)
    arrivals = torch.empty(rows, dtype=torch.int32, device=masses.device)
    span = span or find_span(rows, chunks, SPAN)
    spans = 1 if chain.probs is None else triton.cdiv(chunks, span)
    sizes = {"width": width, "block": block, "num_warps": num_warps}
    overlapped = overlap(laws.logits)
    _measure_kernel[(chunks, rows, laws.places)](
        chain,
        laws,
        measures,
        arrivals,
        threads=32 * num_warps,
        enable_fp_fusion=False,
        **sizes,
        **overlapped,
    )
    _settle_kernel[(spans, rows)](
        chain,
        laws,
        measures,
        Residuals(masses, None, None, 1, chunks * num_warps),
        arrivals,
        outcome,
        rule="point" if chain.probs is None else "chain",
        span=span,
        padded_places=triton.next_power_of_2(width + 1),
        padded_chunks=triton.next_power_of_2(chunks),
        warps=num_warps,
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
    arrivals,
    is_early: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    threads: tl.constexpr,
):
    # No program divides to find its part: that alone took a tenth of the time. The first places are
    # the last, so that they are in the cache when a token is rejected there, as it mostly is.
    wait_for_last(is_early)
    chunk, row = tl.program_id(0), tl.program_id(1)
    place = width - tl.program_id(2)
    if (place == 0) & (chunk == 0):
        tl.store(arrivals + row, 0)
    if place <= count_valid(chain, row, width):
        measure(measures, laws, row, place, chunk, False, block, threads)


@triton.jit
def _settle_kernel(
    chain,
    laws,
    measures,
    residuals,
    arrivals,
    outcome,
    is_early: tl.constexpr,
    rule: tl.constexpr,
    span: tl.constexpr,
    width: tl.constexpr,
    padded_places: tl.constexpr,
    block: tl.constexpr,
    warps: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    item, row = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)  # the last measured
    draft = read_draft_tokens(chain, laws, row, rule, width, padded_places)
    wait_for_last(is_early)
    decision = decide_tokens(laws, measures, row, draft, padded_places, block, padded_chunks)
    is_last = item == 0
    if rule == "chain":
        is_last = _subtract(
            residuals, arrivals, chain, laws, row, decision, draft[0], item, span, block, warps
        )
    if is_last:
        settle_tokens(
            chain,
            laws,
            residuals,
            outcome,
            row,
            draft,
            decision,
            rule,
            width,
            padded_places,
            block,
            warps,
            padded_chunks,
        )


@triton.jit
def _subtract(
    residuals,
    arrivals,
    chain,
    laws,
    row,
    decision,
    num_valid,
    item,
    span: tl.constexpr,
    block: tl.constexpr,
    warps: tl.constexpr,
):
    """Takes the draft off a span of chunks at the place of the rejected token, if there is one. One
    of a row's programs is told that the row can be settled.
    """
    place, law, _ = decision
    is_last = item == 0
    if place < num_valid:
        order, first = (law, tl.full((), 1.0, tl.float32)), item * span
        subtract_span(residuals, chain, laws, row, 0, place, order, first, span, block, warps)
        is_last = announce(arrivals + row) == tl.num_programs(0) - 1
    return is_last
