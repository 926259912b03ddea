"""`find_floor` on a GPU, in one launch and without sorting: one program per row searches for the
threshold among the integers that are ordered as the row's floats are.

Each pass over a row weighs what lies below three thresholds and keeps a quarter of the range, so
logits of half precision take at most 8 passes, and float32 ones 16.

Legend: B rows, N places of a window, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gate import Floor, Gate, Truncation
from specdec.kernels.triton_laws import (
    INFINITY,
    LOG2_E,
    find_ties,
    from_key,
    laws_of,
    point_to,
    to_key,
)

BLOCK = 4096
NUM_WARPS = 16
REGISTERS = 64  # of a thread
STAGES = tl.constexpr(3)
LEAST_KEY = tl.constexpr(-(2**31))
LARGEST_KEY = tl.constexpr(2**31 - 1)


def find_floor(
    logits: Tensor,
    temperature: Tensor | None,
    truncation: Truncation,
    *,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
) -> Floor:
    """As `gate.find_floor`, of a floor that keeps the same tokens.

    Args:
        logits: `[B, V]` or `[B, N, V]`.
        temperature: `[B]` or `None`.
        truncation: what to keep.
        block: tokens that are read at a time.
        num_warps: of each row's program.
    """
    shape = logits.shape[:-1]
    window = logits[:, None] if logits.dim() == 2 else logits
    floor = Floor(
        torch.empty(shape, dtype=torch.float32, device=logits.device),
        torch.empty(shape, dtype=torch.long, device=logits.device),
    )
    columns = [None if t is None else t.contiguous() for t in truncation[:3]]
    with torch.cuda.device_of(logits):
        _floor_kernel[(floor.ids.numel(),)](
            laws_of(window, Gate(temperature)),
            Truncation(*columns),
            floor,
            block=block,
            num_warps=num_warps,
            maxnreg=REGISTERS,
        )
    return floor


@triton.jit
def _find_range(start, vocab, block: tl.constexpr):
    """The least and the largest key of a row."""
    least = tl.full((block,), LARGEST_KEY, tl.int32)
    largest = tl.full((block,), LEAST_KEY, tl.int32)
    for first in tl.range(0, vocab, block, num_stages=STAGES):
        ids = first + tl.arange(0, block)
        key = to_key(tl.load(start + ids, mask=ids < vocab, other=0.0))
        least = tl.minimum(least, tl.where(ids < vocab, key, LARGEST_KEY))
        largest = tl.maximum(largest, tl.where(ids < vocab, key, LEAST_KEY))
    return tl.min(least, axis=0), tl.max(largest, axis=0)


@triton.jit
def _bound(key, dtype: tl.constexpr):
    return from_key(key.to(tl.int32), dtype)


@triton.jit
def _search(start, vocab, least, largest, budget, peak, rate, by_mass: tl.constexpr, dtype, block):
    """The largest key T, from `least` to `largest`, such that the tokens of keys least..T - 1 weigh
    at most the budget; each weighs 1, or its probability relative to the peak's.
    """
    low, high = least.to(tl.int64), largest.to(tl.int64) + 1  # low satisfies this, high does not
    bottom = from_key(least, dtype)
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        one, two = low + step, tl.minimum(low + 2 * step, high - 1)
        three = tl.minimum(low + 3 * step, high - 1)
        first_bound, second_bound = _bound(one, dtype), _bound(two, dtype)
        third_bound = _bound(three, dtype)
        below_one = tl.zeros((block,), tl.float32)
        below_two, below_three = below_one, below_one
        for first in tl.range(0, vocab, block, num_stages=STAGES):
            ids = first + tl.arange(0, block)
            x = tl.load(start + ids, mask=ids < vocab, other=INFINITY).to(tl.float32)
            weight = tl.full((block,), 1.0, tl.float32)
            if by_mass:
                weight = tl.where(x >= bottom, tl.exp2((x - peak) * rate), 0.0)
            below_one += tl.where(x < first_bound, weight, 0.0)
            below_two += tl.where(x < second_bound, weight, 0.0)
            below_three += tl.where(x < third_bound, weight, 0.0)
        fits_one = tl.sum(below_one.to(tl.float64), axis=0) <= budget
        fits_two = tl.sum(below_two.to(tl.float64), axis=0) <= budget
        fits_three = tl.sum(below_three.to(tl.float64), axis=0) <= budget
        high = tl.where(fits_three, high, three)
        high = tl.where(fits_two, high, two)
        high = tl.where(fits_one, high, one)
        low = tl.where(fits_one, one, low)
        low = tl.where(fits_one & fits_two, two, low)
        low = tl.where(fits_one & fits_two & fits_three, three, low)
    return low.to(tl.int32)


@triton.jit
def _weigh_above(start, vocab, least, at, last, peak, rate, block):
    """What the tokens from `least` on weigh, what those of them below `at` weigh, and how many lie
    from `at` to `last`.
    """
    total = tl.zeros((block,), tl.float32)
    below, ties = total, total
    for first in tl.range(0, vocab, block, num_stages=STAGES):
        ids = first + tl.arange(0, block)
        x = tl.load(start + ids, mask=ids < vocab, other=-INFINITY).to(tl.float32)
        weight = tl.where(x >= least, tl.exp2((x - peak) * rate), 0.0)
        total += weight
        below += tl.where(x < at, weight, 0.0)
        ties += tl.where((x >= at) & (x <= last), 1.0, 0.0)
    total, below = total.to(tl.float64), below.to(tl.float64)
    return tl.sum(total, axis=0), tl.sum(below, axis=0), tl.sum(ties, axis=0)


@triton.jit
def _find_tie(start, vocab, at, last, rank, block):
    """The id of the token from `at` to `last` that has `rank` others before it."""
    seen, found = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for first in range(0, vocab, block):
        ids = first + tl.arange(0, block)
        x = tl.load(start + ids, mask=ids < vocab, other=float("nan")).to(tl.float32)
        is_tie = ((x >= at) & (x <= last)).to(tl.int32)
        is_it = (is_tie > 0) & (seen + tl.cumsum(is_tie, axis=0) == rank + 1)
        found += tl.sum(tl.where(is_it, ids, 0), axis=0)
        seen += tl.sum(is_tie, axis=0)
    return found


@triton.jit
def _cut_tail(start, vocab, tail, least, largest, peak, rate, temperature, dtype, block):
    """The floor of top-p over the tokens from logit `least` on: its logit, scaled, and its id."""
    total, _, _ = _weigh_above(start, vocab, least, least, least, peak, rate, block)
    budget = tail * total
    bottom = to_key(least.to(dtype))
    at = _search(start, vocab, bottom, largest, budget, peak, rate, True, dtype, block)
    at = tl.div_rn(from_key(at, dtype), temperature)
    first, last = find_ties(at, temperature)
    _, below, ties = _weigh_above(start, vocab, least, first, last, peak, rate, block)
    weight = tl.exp2((last - peak) * rate).to(tl.float64)
    gone = tl.minimum(tl.floor((budget - below) / weight), ties.to(tl.float64) - 1)
    tie = tl.full((), 0, tl.int64)
    if gone > 0:  # of ties the lowest ids go; and the most likely token stays
        tie = _find_tie(start, vocab, first, last, gone.to(tl.int32), block).to(tl.int64)
    return at, tie


@triton.jit
def _floor_kernel(laws, truncation, floor, block: tl.constexpr):
    spot = tl.program_id(0)
    row, place, vocab = spot // laws.places, spot % laws.places, laws.vocab
    start = point_to(laws.logits, row, place, laws.row_stride, laws.place_stride)
    dtype: tl.constexpr = laws.logits.dtype.element_ty
    temperature = tl.full((), 1.0, tl.float32)
    if laws.gate.temperature is not None:
        temperature = tl.load(laws.gate.temperature + row).to(tl.float32)
    rate = tl.div_rn(tl.full((), LOG2_E, tl.float32), temperature)
    bottom, largest = _find_range(start, vocab, block)
    peak, least = from_key(largest, dtype), from_key(bottom, dtype)
    at, tie = tl.full((), -INFINITY, tl.float32), tl.full((), 0, tl.int64)
    if truncation.top_k is not None:
        top_k = tl.load(truncation.top_k + row)
        if top_k > 0:
            budget = (vocab - tl.minimum(top_k, vocab)).to(tl.float64)
            key = _search(start, vocab, bottom, largest, budget, peak, rate, False, dtype, block)
            at = tl.div_rn(from_key(key, dtype), temperature)
            least, _ = find_ties(at, temperature)
    if truncation.tail is not None:
        tail = tl.load(truncation.tail + row).to(tl.float32).to(tl.float64)
        if tail >= 0:
            at, tie = _cut_tail(
                start, vocab, tail, least, largest, peak, rate, temperature, dtype, block
            )
    if truncation.min_p is not None:
        min_p = tl.load(truncation.min_p + row).to(tl.float32)
        bound = tl.div_rn(peak, temperature) + tl.log(min_p)
        tie = tl.where(bound > at, 0, tie)
        at = tl.where(bound > at, bound, at)
    tl.store(floor.logits + spot, at)
    tl.store(floor.ids + spot, tie)
