"""`find_floor` on a GPU, in one launch and without sorting: one program per row searches for the
threshold among the integers that are ordered as the row's floats are.

Each pass over a row weighs what lies below three thresholds and keeps a quarter of the range, so
half-precision logits take at most 8 passes, and float32 ones 16.

Legend: B rows, N places of a window, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gate import Floor, Gate, Truncation
from specdec.kernels.triton_rows import INFINITY, LOG2_E, laws_of, point_to, read_gate

BLOCK = 8192
NUM_WARPS = 16


def find_floor(
    logits: Tensor,
    temperature: Tensor | None,
    truncation: Truncation,
    *,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
) -> Floor:
    """As `gate.find_floor`, of a floor that keeps the same tokens; a row's program has `num_warps`
    warps and reads `block` tokens at a time.
    """
    shape = logits.shape[:-1]
    window = logits[:, None] if logits.dim() == 2 else logits
    floor = Floor(
        torch.empty(shape, dtype=torch.float32, device=logits.device),
        torch.empty(shape, dtype=torch.long, device=logits.device),
    )
    with torch.cuda.device_of(logits):
        _floor_kernel[(floor.ids.numel(),)](
            laws_of(window, Gate(temperature)),
            Truncation(*(None if t is None else t.contiguous() for t in truncation[:3])),
            floor,
            block=block,
            num_warps=num_warps,
        )
    return floor


@triton.jit
def to_key(x):
    """int32 in the order of floats; both zeros are 0."""
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        return tl.where(bits < 0, -(bits & 0x7FFF), bits)


@triton.jit
def from_key(key, dtype: tl.constexpr):
    """The float of a key, in float32."""
    size = tl.abs(key)
    if dtype == tl.float32:
        value = size.to(tl.float32, bitcast=True)
    else:
        value = size.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return tl.where(key < 0, -value, value)


@triton.jit
def _read(laws, start, ids, temperature, other: tl.constexpr):
    """Logits in whose order the search is done: scaled, except that logits of half precision stay
    as they are, since no two of them have one quotient in float32.
    """
    x = tl.load(start + ids, mask=ids < laws.vocab, other=other)
    if x.dtype == tl.float32 and laws.gate.temperature is not None:
        x = tl.div_rn(x, temperature)
    return x


@triton.jit
def _find_range(laws, start, temperature, block: tl.constexpr):
    """The least and the largest key of a row."""
    least = tl.full((block,), 2147483647, tl.int32)
    largest = tl.full((block,), -2147483648, tl.int32)
    for first in range(0, laws.vocab, block):
        ids = first + tl.arange(0, block)
        key = to_key(_read(laws, start, ids, temperature, 0.0))
        least = tl.minimum(least, tl.where(ids < laws.vocab, key, 2147483647))
        largest = tl.maximum(largest, tl.where(ids < laws.vocab, key, -2147483648))
    return tl.min(least, axis=0), tl.max(largest, axis=0)


@triton.jit
def _search(
    laws, start, temperature, least, largest, budget, peak, rate, by_mass: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """The largest key T, from `least` to `largest`, such that the tokens of keys least..T - 1 weigh
    at most the budget; each weighs 1, or its probability relative to the largest.
    """
    low, high = least.to(tl.int64), largest.to(tl.int64) + 1  # low satisfies this, high does not
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        one, two = low + step, tl.minimum(low + 2 * step, high - 1)
        three = tl.minimum(low + 3 * step, high - 1)
        below_one = tl.zeros((block,), tl.float32)
        below_two, below_three = below_one, below_one
        for first in range(0, laws.vocab, block):
            x = _read(laws, start, first + tl.arange(0, block), temperature, INFINITY)
            key, weight = to_key(x), tl.full((block,), 1.0, tl.float32)
            if by_mass:
                weight = tl.exp2((x.to(tl.float32) - peak) * rate)
            weight = tl.where((key >= least) & (key < three.to(tl.int32)), weight, 0.0)
            below_one += tl.where(key < one.to(tl.int32), weight, 0.0)
            below_two += tl.where(key < two.to(tl.int32), weight, 0.0)
            below_three += weight
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
def _weigh_above(laws, start, temperature, least, at, peak, rate, block: tl.constexpr):
    """What the tokens of keys from `least` on weigh, what those of them below `at` weigh, and how
    many are at it.
    """
    total = tl.zeros((block,), tl.float32)
    below, ties = total, total
    for first in range(0, laws.vocab, block):
        x = _read(laws, start, first + tl.arange(0, block), temperature, -INFINITY)
        key = to_key(x)
        weight = tl.where(key >= least, tl.exp2((x.to(tl.float32) - peak) * rate), 0.0)
        total += weight
        below += tl.where(key < at, weight, 0.0)
        ties += tl.where(key == at, 1.0, 0.0)
    sums = total.to(tl.float64), below.to(tl.float64)
    return tl.sum(sums[0], axis=0), tl.sum(sums[1], axis=0), tl.sum(ties, axis=0)


@triton.jit
def _find_tie(laws, start, temperature, at, rank, block: tl.constexpr):
    """The id of the token of key `at` that has `rank` others of it before."""
    seen, found = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for first in range(0, laws.vocab, block):
        ids = first + tl.arange(0, block)
        key = to_key(_read(laws, start, ids, temperature, 0.0))
        is_tie = ((key == at) & (ids < laws.vocab)).to(tl.int32)
        is_it = (is_tie > 0) & (seen + tl.cumsum(is_tie, axis=0) == rank + 1)
        found += tl.sum(tl.where(is_it, ids, 0), axis=0)
        seen += tl.sum(is_tie, axis=0)
    return found


@triton.jit
def _floor_kernel(laws, truncation, floor, block: tl.constexpr):
    spot = tl.program_id(0)
    row, place = spot // laws.places, spot % laws.places
    start = point_to(laws.logits, row, place, laws.row_stride, laws.place_stride)
    _, temperature, _, _ = read_gate(laws, row, place)
    dtype: tl.constexpr = laws.logits.dtype.element_ty
    rate = tl.full((), LOG2_E, tl.float32)
    if dtype != tl.float32:
        rate = tl.div_rn(rate, temperature)
    least, largest = _find_range(laws, start, temperature, block)
    peak = from_key(largest, dtype)
    at, tie = tl.full((), -2147483648, tl.int32), tl.full((), 0, tl.int64)  # below every key
    if truncation.top_k is not None:
        top_k = tl.load(truncation.top_k + row)
        if top_k > 0:
            budget = (laws.vocab - tl.minimum(top_k, laws.vocab)).to(tl.float64)
            at = _search(laws, start, temperature, least, largest, budget, peak, rate, False, block)
    if truncation.tail is not None:
        tail = tl.load(truncation.tail + row).to(tl.float32).to(tl.float64)
        if tail >= 0:
            kept = tl.maximum(at, least)
            total, _, _ = _weigh_above(laws, start, temperature, kept, kept, peak, rate, block)
            budget = tail * total
            at = _search(laws, start, temperature, kept, largest, budget, peak, rate, True, block)
            _, below, ties = _weigh_above(laws, start, temperature, kept, at, peak, rate, block)
            weight = tl.exp2((from_key(at, dtype) - peak) * rate).to(tl.float64)
            gone = tl.minimum(tl.floor((budget - below) / weight), ties.to(tl.float64) - 1)
            if gone > 0:
                tie = _find_tie(laws, start, temperature, at, gone.to(tl.int32), block).to(tl.int64)
    bound = from_key(at, dtype)
    if dtype != tl.float32:
        bound = tl.div_rn(bound, temperature)
        peak = tl.div_rn(peak, temperature)
    bound = tl.where(at == -2147483648, -INFINITY, bound)
    if truncation.min_p is not None:
        min_p = tl.load(truncation.min_p + row).to(tl.float32)
        least_likely = peak + tl.log(min_p)
        tie = tl.where(least_likely > bound, 0, tie)
        bound = tl.where(least_likely > bound, least_likely, bound)
    tl.store(floor.logits + spot, bound)
    tl.store(floor.ids + spot, tie)
