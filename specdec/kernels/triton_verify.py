"""`verify_tokens` and `verify_blocks` on a GPU, in three launches (point masses in two).

Soft draft laws pass memory once. Programs take numbered items in order, and the measures of later
rows lie between the measures of a row and its residuals, so that the residuals find the row
measured and its logits still in the cache. An item waits for items of lower numbers only; these are
done or running, so no wait is for ever. Then one program per row settles it (`triton_settle`).

Legend: B rows, K draft tokens (width), V vocabulary, C chunks of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gate import Gate
from specdec.kernels.triton_decide import (
    Chain,
    Residuals,
    accept_tokens,
    count_valid,
    follow_path,
    weigh_tokens,
)
from specdec.kernels.triton_rows import (
    INFINITY,
    STAGES,
    Laws,
    Measures,
    combine,
    find_span,
    laws_of,
    measure_span,
    new_measures,
    pick,
    pick_law,
    point_to,
    read_gate,
    weigh,
    with_dense_rows,
)
from specdec.kernels.triton_sample import measure_rows
from specdec.kernels.triton_settle import settle, subtract

BLOCK = 4096
NUM_WARPS = 4
LAG = 16


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
        lag: rows that are measured ahead of a row's residuals.
        span: chunks that one program reads; `None` goes by how many there are.
    """
    laws = laws_of(logits, gate)
    if draft_probs is not None:
        draft_probs = with_dense_rows(draft_probs) if draft_tokens.shape[1] else None
    chain = Chain(
        draft_tokens.contiguous(),
        draft_probs,
        *((0, 0) if draft_probs is None else draft_probs.stride()[:2]),
        None if num_valid is None else num_valid.contiguous(),
        accept_uniforms,
        *accept_uniforms.stride(),
        resample_uniforms,
        *resample_uniforms.stride(),
    )
    size = dict(block=block, num_warps=num_warps)
    rule, residuals = "block" if by_block else "chain", None
    with torch.cuda.device_of(logits):
        if chain.probs is None:
            rule, measures = "point", measure_rows(logits, laws, chain.num_valid, span, **size)
        else:
            measures = new_measures(logits, gate, block)
            residuals = _subtract_rows(rule, chain, laws, measures, lag=lag, span=span, **size)
        return settle(rule, chain, laws, measures, residuals, block=block, num_warps=8)


def _subtract_rows(
    rule: str,
    chain: Chain,
    laws: Laws,
    measures: Measures,
    *,
    lag: int,
    span: int | None,
    block: int,
    num_warps: int,
) -> Residuals:
    """Measures the target's rows and takes the draft off."""
    (rows, width), device = chain.tokens.shape, laws.logits.device
    places, halves = width if rule == "block" else 1, triton.cdiv(laws.vocab, block // 2)
    mass = torch.empty(rows, places, halves, dtype=torch.float64, device=device)
    residuals = Residuals(mass, torch.empty_like(mass, dtype=torch.float32), places, halves)
    span = span or find_span(rows * laws.places, measures.chunks)
    spans = triton.cdiv(measures.chunks, span)
    counters = torch.zeros(1 + rows, dtype=torch.int32, device=device)
    _verify_kernel[(rows * (laws.places + places) * spans,)](
        chain,
        laws,
        measures,
        residuals,
        counters,
        rows,
        min(lag, rows),
        span,
        rule=rule,
        width=width,
        padded_places=triton.next_power_of_2(width + 1),
        block=block,
        padded_chunks=triton.next_power_of_2(measures.chunks),
        num_warps=num_warps,
    )
    return residuals


@triton.jit
def _find_item(ticket, rows, lag, measured, subtracted):
    """Whether a ticket is for a measure, its row, and its number among the row's. The order:
    measures of rows 0..lag - 1; then of row lag, residuals of row 0, measures of row lag + 1, ...
    """
    turn = (ticket - lag * measured) // (measured + subtracted)
    within = (ticket - lag * measured) % (measured + subtracted)
    left = ticket - rows * measured - (rows - lag) * subtracted  # >= 0 when all is measured
    is_first, is_last = ticket < lag * measured, left >= 0
    is_measure = is_first | ((within < measured) & (left < 0))
    row = tl.where(within < measured, turn + lag, turn)
    row = tl.where(is_first, ticket // measured, row)
    row = tl.where(is_last, rows - lag + left // subtracted, row)
    item = tl.where(within < measured, within, within - measured)
    item = tl.where(is_first, ticket % measured, item)
    item = tl.where(is_last, left % subtracted, item)
    return is_measure, row, item


@triton.jit
def _subtract(residuals, laws, gate, law, factor, slot, ids, x, draft):
    """Stores the mass of a residual and of its draft law over tokens `ids`."""
    draft = draft.to(tl.float32)
    left = subtract(weigh(laws, gate, law, ids, x), draft, factor)
    tl.store(residuals.mass + slot, tl.sum(left.to(tl.float64), axis=0))
    tl.store(residuals.draft_mass + slot, tl.sum(draft, axis=0))


@triton.jit
def _subtract_span(
    chain, laws, residuals, law, factor, row, place, slots, first, last, half: tl.constexpr
):
    """Takes the draft off in the halves first..last - 1; for copies, see `measure_span`."""
    start = point_to(laws.logits, row, place, laws.row_stride, laws.place_stride)
    of_draft = point_to(chain.probs, row, place, chain.row_stride, chain.place_stride)
    gate, whole = read_gate(laws, row, place), laws.vocab // half
    for number in tl.range(first, tl.minimum(last, whole), num_stages=STAGES):
        ids = number * half + tl.arange(0, half)
        x = tl.load(start + ids, eviction_policy="evict_first")
        draft = tl.load(of_draft + ids, eviction_policy="evict_first")
        _subtract(residuals, laws, gate, law, factor, slots + number, ids, x, draft)
    if last > whole:
        ids = whole * half + tl.arange(0, half)
        x = tl.load(start + ids, mask=ids < laws.vocab, other=-INFINITY)
        draft = tl.load(of_draft + ids, mask=ids < laws.vocab, other=0.0)
        _subtract(residuals, laws, gate, law, factor, slots + whole, ids, x, draft)


@triton.jit
def _verify_kernel(
    chain,
    laws,
    measures,
    residuals,
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
    measured, subtracted = (width + 1) * spans, residuals.places * spans
    is_measure, row, item = _find_item(ticket, rows, lag, measured, subtracted)
    place, first = item // spans, item % spans * span
    num_valid = count_valid(chain, row, width)
    if is_measure:
        if place <= num_valid:
            measure_span(measures, laws, row, place, first, span, block)
        tl.debug_barrier()  # what every thread wrote comes before the arrival
        tl.atomic_add(counters + 1 + row, 1, sem="release")
    else:
        while tl.atomic_add(counters + 1 + row, 0, sem="acquire") < measured:
            pass
        slots = (tl.cast(row, tl.int64) * residuals.places + place) * residuals.halves
        places = tl.arange(0, padded_places)
        rate, _, _, _ = read_gate(laws, row, 0)
        target, _ = combine(measures, laws, row, places, rate, block, padded_chunks)
        p, q, _ = weigh_tokens(chain, laws, row, places, num_valid, target, width)
        factor = 1.0
        if rule == "chain":
            place = accept_tokens(chain, row, places, num_valid, p, q, width)
        else:
            factor = pick(follow_path(places, p, q, width), places, place).to(tl.float32)
        if place < num_valid:
            law = pick_law(target, places, place)
            last = tl.minimum(2 * (first + span), residuals.halves)
            _subtract_span(
                chain, laws, residuals, law, factor, row, place, slots, 2 * first, last, block // 2
            )
