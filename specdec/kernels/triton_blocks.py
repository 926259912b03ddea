"""`verify_blocks` on a GPU.

The draft is taken off at every place, for which all logits are needed again: one launch clears
tables, and one does all else. Its programs each do one thing, in this order: measure a chunk of the
target's rows, decide a row that is measured, take the draft off a span of chunks, settle a row. The
measures of later rows lie before what else is to be done of a row, so that it finds its row
measured and the logits still in the cache, and memory is passed once. A program waits for programs
of lower ids only; see `triton_launch`.

Legend: B rows, K draft tokens (width), V vocabulary, C chunks of a row.
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.triton_decide import Chain, count_valid, decide_block, read_draft_tokens
from specdec.kernels.triton_launch import new_words, overlap, wait_for_last
from specdec.kernels.triton_laws import Laws
from specdec.kernels.triton_residual import Residuals, order_residuals, read_order, subtract_span
from specdec.kernels.triton_rows import Measures, find_span, measure
from specdec.kernels.triton_settle import Outcome, settle_block

SPAN = 2  # chunks that a program takes the draft off
LAG_BYTES = 24_000_000  # of logits; beside the draft's laws they must stay in the cache
REGISTERS = 72, 112  # of a thread, for half precision without a floor, and else


def verify_by_block(
    chain: Chain,
    laws: Laws,
    outcome: Outcome,
    *,
    block: int,
    num_warps: int,
    lag: int | None,
    span: int | None,
) -> None:
    """Fills `outcome`; for the options see `triton_verify.verify`."""
    rows, width = chain.tokens.shape
    row_bytes = laws.places * laws.vocab * laws.logits.element_size()
    lag = min(lag or max(1, LAG_BYTES // row_bytes), rows)
    measures, residuals = _new_tables(laws, width, block, num_warps)
    span = span or find_span(rows * laws.places, measures.chunks, SPAN)
    spans = triton.cdiv(measures.chunks, span)
    items = laws.places * measures.chunks + residuals.count * spans + 2
    _block_kernel[((rows + lag + 1) * items,)](
        chain,
        laws,
        measures,
        residuals,
        outcome,
        rows,
        lag,
        span,
        chunks=measures.chunks,
        spans=spans,
        width=width,
        padded_places=triton.next_power_of_2(width + 1),
        block=block,
        warps=num_warps,
        padded_chunks=triton.next_power_of_2(measures.chunks),
        num_warps=num_warps,
        maxnreg=REGISTERS[laws.logits.element_size() > 2 or laws.gate.floor is not None],
        enable_fp_fusion=False,  # equal laws must subtract to 0
        **overlap(laws.logits),
    )


def _new_tables(laws: Laws, count: int, block: int, num_warps: int) -> tuple[Measures, Residuals]:
    """Tables of which nothing is written, with `count` residuals a row."""
    rows, chunks = laws.logits.shape[0], triton.cdiv(laws.vocab, block)
    spots, slots = rows * laws.places * chunks, rows * count
    parts = chunks * num_warps
    sizes = [slots, spots, spots, spots, 2 * slots * parts, 3 * slots]
    hot, best, *tables = new_words(sizes, laws.logits.device)
    largest, weight, masses, orders = (table.view(torch.float32) for table in tables)
    measures = Measures(largest, weight, None if laws.gate.is_greedy is None else best, chunks)
    return measures, Residuals(masses, orders, hot, count, parts)


@triton.jit
def _block_kernel(
    chain,
    laws,
    measures,
    residuals,
    outcome,
    rows,
    lag,
    span: tl.constexpr,
    chunks: tl.constexpr,
    spans: tl.constexpr,
    is_early: tl.constexpr,
    width: tl.constexpr,
    padded_places: tl.constexpr,
    block: tl.constexpr,
    warps: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    measured: tl.constexpr = (width + 1) * chunks
    subtracted: tl.constexpr = width * spans
    # A turn: measure row `turn`, subtract in row `turn - lag`, decide the former, settle the row
    # before the latter. Divisors are constants, since a division proper costs as much as a load.
    turn = tl.program_id(0) // (measured + subtracted + 2)
    item = tl.program_id(0) % (measured + subtracted + 2)
    is_measure, is_last = item < measured, item == measured + subtracted + 1
    is_subtraction = (item >= measured) & (item < measured + subtracted)
    row = tl.where(is_subtraction, turn - lag, tl.where(is_last, turn - lag - 1, turn))
    if (row >= 0) & (row < rows):
        if is_measure:
            place, chunk = item // chunks, item % chunks
            if place <= count_valid(chain, row, width):
                measure(measures, laws, row, place, chunk, is_early, block, 32 * warps)
        elif is_subtraction:
            item -= measured
            place, first = item // spans, item % spans * span
            if place < count_valid(chain, row, width):
                wait_for_last(is_early)
                order = read_order(residuals, row, place)
                subtract_span(
                    residuals, chain, laws, row, place, place, order, first, span, block, warps
                )
        else:
            draft = read_draft_tokens(chain, laws, row, "block", width, padded_places)
            wait_for_last(is_early)
            if is_last:
                settle_block(
                    chain,
                    laws,
                    measures,
                    residuals,
                    outcome,
                    row,
                    draft,
                    width,
                    padded_places,
                    block,
                    warps,
                    padded_chunks,
                )
            else:
                kept, target, _ = decide_block(
                    laws, measures, row, draft, width, padded_places, block, padded_chunks
                )
                order_residuals(residuals, row, tl.arange(0, padded_places), target, kept)
