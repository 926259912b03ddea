"""`verify_tokens` and `verify_blocks` on a GPU: one launch, behind one that clears its counters.

Programs take numbered items in order: to measure a chunk of the target's rows, to decide a row that
is measured, to take the draft off a chunk, to settle a row. The measures of later rows lie before
what else is to be done of a row, so that it finds its row measured and the logits still in the
cache, and memory is passed once. An item waits for items of lower numbers only; these are done or
running, so no wait is for ever.

Legend: B rows, K draft tokens (width), V vocabulary, C chunks of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gate import Gate
from specdec.kernels.triton_decide import Chain, count_valid, decide, read_draft_tokens
from specdec.kernels.triton_laws import Laws, laws_of, with_dense_rows
from specdec.kernels.triton_residual import Residuals, order_residuals, subtract_span
from specdec.kernels.triton_rows import find_span, measure_span, new_measures
from specdec.kernels.triton_settle import Outcome, settle

BLOCK = 4096
NUM_WARPS = 4
LAG = 8
SPAN = 2
REGISTERS = 64, 96  # of a thread, without a floor and with one: programs must fill the GPU


def verify(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    num_valid: Tensor | None,
    logits: Tensor,
    gate: Gate,
    accept_uniforms: Tensor,
    resample_uniforms: Tensor,
    *,
    by_block: bool,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
    lag: int = LAG,
    span: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `ops.verify_blocks` if `by_block`, else as `ops.verify_tokens`.

    One difference: token by token, `Fault.DRAFT_LAW` is judged by the one law of each row that is
    read in full, that of the rejected token.

    Args:
        by_block: the rule.
        block: tokens of a chunk.
        num_warps: of a program.
        lag: rows that are measured ahead.
        span: chunks of an item; `None` goes by how many there are.
    """
    (rows, width), device = draft_tokens.shape, logits.device
    rule = "point" if draft_probs is None or width == 0 else "block" if by_block else "chain"
    laws = laws_of(logits, gate)
    chain = _chain_of(
        draft_tokens,
        None if rule == "point" else draft_probs,
        num_valid,
        accept_uniforms,
        resample_uniforms,
    )
    tokens = torch.empty(rows, width + 1, dtype=torch.long, device=device)
    outcome = Outcome(tokens, *(torch.empty_like(tokens[:, 0]) for _ in range(2)))
    measures = new_measures(logits, gate, block)
    residuals = _new_residuals({"point": 0, "chain": 1, "block": width}[rule], laws, measures)
    span = span or find_span(rows * laws.places, measures.chunks, SPAN)
    spans, lag = triton.cdiv(measures.chunks, span), min(lag, rows)
    items = (laws.places + residuals.count) * spans + 2
    with torch.cuda.device_of(logits):
        _verify_kernel[((rows + lag + 1) * items,)](
            chain,
            laws,
            measures,
            residuals,
            outcome,
            torch.zeros(1 + 3 * rows, dtype=torch.int32, device=device),
            rows,
            lag,
            span,
            rule=rule,
            width=width,
            padded_places=triton.next_power_of_2(width + 1),
            block=block,
            padded_chunks=triton.next_power_of_2(measures.chunks),
            num_warps=num_warps,
            maxnreg=REGISTERS[gate.floor is not None],
            enable_fp_fusion=False,  # equal laws must subtract to 0
        )
    return tuple(outcome)


def _chain_of(
    tokens: Tensor,
    probs: Tensor | None,
    num_valid: Tensor | None,
    accept: Tensor,
    resample: Tensor,
) -> Chain:
    probs = None if probs is None else with_dense_rows(probs)
    strides = (0, 0) if probs is None else probs.stride()[:2]
    num_valid = None if num_valid is None else num_valid.contiguous()
    draws = accept, *accept.stride(), resample, *resample.stride()
    return Chain(tokens.contiguous(), probs, *strides, num_valid, *draws)


def _new_residuals(count: int, laws: Laws, measures) -> Residuals:
    """Tables for `count` residuals of a row, not filled."""
    shape = laws.logits.shape[0], count
    masses = torch.empty(*shape, measures.chunks, 2, dtype=torch.float64, device=laws.logits.device)
    orders = torch.empty(*shape, 3, dtype=torch.float32, device=masses.device)
    places = torch.empty(*shape, 2, dtype=torch.int32, device=masses.device)
    return Residuals(masses, orders, places, count, measures.chunks)


@triton.jit
def _announce(counter):
    """What the program wrote comes before what others read when they have waited for it."""
    tl.debug_barrier()  # every thread wrote
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def _wait(counter, count):
    while tl.atomic_add(counter, 0, sem="acquire") < count:
        pass


@triton.jit
def _order(
    laws,
    measures,
    residuals,
    row,
    draft,
    rule: tl.constexpr,
    width: tl.constexpr,
    padded_places: tl.constexpr,
    block: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    """Decides what residuals of a row are needed."""
    decided, target, _ = decide(
        laws, measures, row, draft, rule, width, padded_places, block, padded_chunks
    )
    place, num_valid = tl.arange(0, padded_places), draft[0]
    if rule == "block":
        order_residuals(residuals, row, place, place, place < num_valid, target, decided)
    else:
        index = tl.where(place == decided, 0, -1)  # of the first rejected token only
        one = tl.full(place.shape, 1.0, tl.float32)
        order_residuals(residuals, row, place, index, place < num_valid, target, one)


@triton.jit
def _verify_kernel(
    chain,
    laws,
    measures,
    residuals,
    outcome,
    counters,
    rows,
    lag,
    span,
    rule: tl.constexpr,
    width: tl.constexpr,
    padded_places: tl.constexpr,
    block: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    ticket = tl.atomic_add(counters, 1, sem="relaxed")
    spans = tl.cdiv(measures.chunks, span)
    measured, subtracted = (width + 1) * spans, residuals.count * spans
    # A turn: measure row `turn`, subtract in row `turn - lag`, decide the former, settle the row
    # before the latter.
    turn, item = ticket // (measured + subtracted + 2), ticket % (measured + subtracted + 2)
    is_measure, is_last = item < measured, item == measured + subtracted + 1
    is_subtraction = (item >= measured) & (item < measured + subtracted)
    row = tl.where(is_subtraction, turn - lag, tl.where(is_last, turn - lag - 1, turn))
    if (row >= 0) & (row < rows):
        arrived = counters + 1 + 3 * row
        if is_measure:
            place, first = item // spans, item % spans * span
            if place <= count_valid(chain, row, width):
                measure_span(measures, laws, row, place, first, span, block)
            _announce(arrived)
        elif is_last:
            draft = read_draft_tokens(chain, laws, row, rule, width, padded_places)
            _wait(arrived, measured)
            _wait(arrived + 2, subtracted)
            settle(
                chain,
                laws,
                measures,
                residuals,
                outcome,
                row,
                draft,
                rule,
                width,
                padded_places,
                block,
                padded_chunks,
            )
        elif rule != "point":
            if is_subtraction:
                index, first = (item - measured) // spans, (item - measured) % spans * span
                last = tl.minimum(first + span, measures.chunks)
                _wait(arrived + 1, 1)
                subtract_span(residuals, chain, laws, row, index, first, last, block)
                _announce(arrived + 2)
            else:
                draft = read_draft_tokens(chain, laws, row, rule, width, padded_places)
                _wait(arrived, measured)
                _order(
                    laws,
                    measures,
                    residuals,
                    row,
                    draft,
                    rule,
                    width,
                    padded_places,
                    block,
                    padded_chunks,
                )
                _announce(arrived + 1)
