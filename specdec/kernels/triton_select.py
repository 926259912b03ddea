"""Device functions that find a floor among candidates: a short list of a row's tokens, or all.

Scaled logits are told by integers of the same order, keys. Masses are whole numbers, so that a sum
does not depend on the order in which tokens came.
"""

import triton
import triton.language as tl

from specdec.kernels.triton_laws import LOG2_E, from_key, to_key

LEAST_KEY = tl.constexpr(-(2**31))
LARGEST_KEY = tl.constexpr(2**31 - 1)  # of no token
COUNT = tl.constexpr(0)  # each candidate weighs 1
MASS = tl.constexpr(1)  # each candidate weighs its mass
TIES = tl.constexpr(2)  # those of one key weigh 1, and are searched by their ids


@triton.jit
def _weigh(x, peak, unit):
    """int64 masses by scaled logits; `unit` at the peak."""
    return (tl.exp2((x - peak) * LOG2_E) * unit).to(tl.int64)


@triton.jit
def weigh_list(tokens, keys, masses, count, logits, temperature, peak, unit, part: tl.constexpr):
    """Fills lists of keys and of masses from a list of tokens; returns the sum of the masses."""
    total = tl.zeros((part,), tl.int64)
    for first in range(0, count, part):
        index = first + tl.arange(0, part)
        ids = tl.load(tokens + index, mask=index < count, other=0)
        x = tl.div_rn(tl.load(logits + ids).to(tl.float32), temperature)
        mass = tl.where(index < count, _weigh(x, peak, unit), 0)
        tl.store(keys + index, to_key(x), mask=index < count)
        tl.store(masses + index, mass, mask=index < count)
        total += mass
    tl.debug_barrier()  # every thread wrote
    return tl.sum(total, axis=0)


@triton.jit
def _read(candidates, index, tie, by: tl.constexpr):
    """What candidates are searched by, LARGEST_KEY for others, and what they weigh.

    Candidates are a tuple: whether they are listed; lists of tokens, keys and masses, and how many;
    the row's logits, of which all are candidates otherwise, its temperature, peak and unit.
    """
    is_listed, tokens, keys, masses, count, logits, temperature, peak, unit = candidates
    ids, weight = index, tl.full(index.shape, 1, tl.int32)
    if by == MASS:
        weight = weight.to(tl.int64)
    if is_listed:
        key = tl.load(keys + index, mask=index < count, other=LARGEST_KEY)
        if by == TIES:
            ids = tl.load(tokens + index, mask=index < count, other=0)
        if by == MASS:
            weight = tl.load(masses + index, mask=index < count, other=0)
    else:
        x = tl.load(logits + index, mask=index < count, other=0.0).to(tl.float32)
        x = tl.div_rn(x, temperature)
        key = tl.where(index < count, to_key(x), LARGEST_KEY)
        if by == MASS:
            weight = _weigh(x, peak, unit)
    if by == TIES:
        key = tl.where(key == tie, ids, LARGEST_KEY)
    return key, weight


@triton.jit
def weigh(candidates, least, part: tl.constexpr):
    """The mass of the candidates below key `least`, and that of the others."""
    below, others = tl.zeros((part,), tl.int64), tl.zeros((part,), tl.int64)
    for first in range(0, candidates[4], part):
        key, mass = _read(candidates, first + tl.arange(0, part), 0, MASS)
        below += tl.where(key < least, mass, 0)
        others += tl.where((key >= least) & (key < LARGEST_KEY), mass, 0)
    return tl.sum(below, axis=0), tl.sum(others, axis=0)


@triton.jit
def _tighten(candidates, low, high, tie, by: tl.constexpr, part: tl.constexpr):
    """The least key of a candidate from `low` on, and the largest below `high`."""
    least = tl.full((part,), LARGEST_KEY, tl.int32)
    largest = tl.full((part,), LEAST_KEY, tl.int32)
    for first in range(0, candidates[4], part):
        key, _ = _read(candidates, first + tl.arange(0, part), tie, by)
        least = tl.minimum(least, tl.where(key >= low, key, LARGEST_KEY))
        largest = tl.maximum(largest, tl.where(key < high, key, LEAST_KEY))
    return tl.min(least, axis=0), tl.max(largest, axis=0)


@triton.jit
def search(candidates, least, budget, tie, by: tl.constexpr, part: tl.constexpr):
    """The largest key of a candidate, from `least` on, such that all below it weigh at most the
    budget, and their weight; by ties, the same of the ids of the candidates of key `tie`.
    """
    largest = tl.full((), LARGEST_KEY, tl.int32)
    low, high = _tighten(candidates, least, largest, tie, by, part)
    below = tl.full((), 0, tl.int64)
    while low < high:
        step = (high.to(tl.int64) - low) // 4 + 1
        one, two = (low + step).to(tl.int32), tl.minimum(low + 2 * step, high).to(tl.int32)
        three = tl.minimum(low + 3 * step, high).to(tl.int32)
        below_one = tl.zeros((part,), tl.int64 if by == MASS else tl.int32)
        below_two, below_three = below_one, below_one
        for first in range(0, candidates[4], part):
            key, weight = _read(candidates, first + tl.arange(0, part), tie, by)
            below_one += tl.where(key < one, weight, 0)
            below_two += tl.where(key < two, weight, 0)
            below_three += tl.where(key < three, weight, 0)
        sum_one, sum_two = tl.sum(below_one, axis=0), tl.sum(below_two, axis=0)
        sum_three = tl.sum(below_three, axis=0)
        fits_one, fits_two, fits_three = sum_one <= budget, sum_two <= budget, sum_three <= budget
        below = tl.where(fits_one, sum_one.to(tl.int64), below)
        below = tl.where(fits_two, sum_two.to(tl.int64), below)
        below = tl.where(fits_three, sum_three.to(tl.int64), below)
        high = tl.where(fits_three, high + 1, three)
        high = tl.where(fits_two, high, two)
        high = tl.where(fits_one, high, one)
        low = tl.where(fits_one, one, low)
        low = tl.where(fits_two, two, low)
        low = tl.where(fits_three, three, low)
        low, high = _tighten(candidates, low, high, tie, by, part)
    return low, below


@triton.jit
def search_pair(candidates, least, before, budget, part: tl.constexpr):
    """The largest pair (scaled logit, id) of a candidate, from key `least` on, such that those
    below it weigh at most the budget, `before` of them being below that key.
    """
    key, below = search(candidates, least, budget, 0, MASS, part)
    x, tie = from_key(key, tl.float32), tl.full((), 0, tl.int32)
    mass = tl.maximum(_weigh(x, candidates[7], candidates[8]), 1)
    gone = (budget - tl.maximum(below, before)) // mass
    if gone > 0:  # of ties the lowest ids go
        tie, _ = search(candidates, tl.full((), 0, tl.int32), gone, key, TIES, part)
    return x, tie.to(tl.int64)
