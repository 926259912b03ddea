"""`find_cutoff` on a GPU: a bisection over the pairs (logit, id) of a row, on a short list of them.

A pair is one int64, `key << 32 | id`, where `key` is an int32 in the order of the scaled logits. Pairs are in the order in which tokens are dropped, and no two are equal, so ties need no
case of their own. The mass of a token is a whole number of units, so sums are exact in any order.

Four launches: softmax partials; `_bracket_kernel` guesses from a sorted sample of the row between
which pairs the cutoff lies; `_list_kernel` lists the pairs there and sums the masses below them;
and `_search_kernel` bisects the list. If the list does not hold the cutoff, or is longer than its
memory, the bisection reads the whole row instead: the guess changes the running time, never the
result.

Legend: B rows, N window indices, V vocabulary, C chunks of a row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_common import (
    INFINITY,
    LOG2_E,
    NO_FUSION,
    Rows,
    from_key,
    merge_row,
    read_logits,
    read_temperature,
    rows_of,
    softmax_partials,
    to_key,
)
from specdec.kernels.truncate.reference import Cutoff, Truncation, WarpParams

BLOCK, NUM_WARPS = 4096, 4
SAMPLES, SAMPLE_WARPS = 2048, 8
PART, SEARCH_WARPS = 4096, 16
WIDTH = tl.constexpr(4.0)  # standard deviations of a sampled token's rank
SLACK = tl.constexpr(8.0)  # ranks, where that deviation is near 0
LEAST = tl.constexpr(-(2**63))  # below every pair
MOST = tl.constexpr(2**63 - 1)  # above every pair


class Shortlist(NamedTuple):
    """The pairs of each row among which its cutoff is sought.

    Args:
        peak: `[B, N]` float32, the row's largest scaled logit.
        bracket: `[B, N, 2]` int64, the least and the largest pair that are listed.
        pairs: `[B, N, capacity]` int64, the pairs listed, in any order.
        sums: `[B, N, 4]` int64: how many pairs are in the bracket; the mass below it; the mass
            below it and in it; the mass of the row.
        capacity: how many pairs can be listed.
        unit: the number of units in the mass of a most likely token.
    """

    peak: Tensor
    bracket: Tensor
    pairs: Tensor
    sums: Tensor
    capacity: int
    unit: float


def find_cutoff(
    logits: Tensor,
    temperature: Tensor | None,
    truncation: Truncation,
    *,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
    samples: int = SAMPLES,
    capacity: int | None = None,
    part: int = PART,
) -> Cutoff:
    """As `kernels.find_cutoff`, with exact sums where the definition rounds them.

    Args:
        logits: `[B, V]` or `[B, N, V]`.
        temperature: `[B]` or `None`.
        truncation: what to keep.
        block: tokens of a chunk, a power of two.
        num_warps: of a program that reads a chunk.
        samples: tokens of a sample, a power of two.
        capacity: how many pairs can be listed; `None` is a quarter of V.
        part: pairs that the search reads at a time, a power of two.
    """
    at = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    cutoff = Cutoff(at, torch.empty_like(at, dtype=torch.long))
    if not at.numel():
        return cutoff
    window = logits[:, None] if logits.dim() == 2 else logits
    rows = rows_of(window, WarpParams(temperature))
    limits = Truncation(*(None if t is None else t.contiguous() for t in truncation[:3]))
    shortlist = _new_shortlist(rows, capacity or triton.cdiv(rows.vocab, 4))
    tables, shape = (rows, limits, shortlist), window.shape[:2]
    with torch.cuda.device_of(logits):
        partials = softmax_partials(rows, block=block, num_warps=num_warps)
        _bracket_kernel[shape](
            *tables,
            partials,
            block=block,
            padded_chunks=triton.next_power_of_2(partials.num_chunks),
            samples=samples,
            num_warps=SAMPLE_WARPS,
            **NO_FUSION,
        )
        _list_kernel[(*shape, partials.num_chunks)](
            *tables, block=block, num_warps=num_warps, **NO_FUSION
        )
        _search_kernel[shape](*tables, cutoff, part=part, num_warps=SEARCH_WARPS, **NO_FUSION)
    return cutoff


def _new_shortlist(rows: Rows, capacity: int) -> Shortlist:
    shape, device = rows.logits.data.shape[:2], rows.logits.data.device
    bracket, pairs, sums = (
        torch.empty(*shape, size, dtype=torch.long, device=device) for size in (2, capacity, 4)
    )
    peak = torch.empty(shape, dtype=torch.float32, device=device)
    unit = 2.0 ** (62 - rows.vocab.bit_length())  # V tokens of mass 1 sum to less than 2**62
    return Shortlist(peak, bracket, pairs, sums, capacity, unit)


@triton.jit
def _read_limits(rows, limits, row):
    """What a row asks for: top_k, at most V, 0 for all; and the mass that top-p may drop, float64,
    -1 for none.
    """
    top_k, droppable = tl.full((), 0, tl.int64), tl.full((), -1.0, tl.float64)
    if limits.top_k is not None:
        top_k = tl.minimum(tl.load(limits.top_k + row), rows.vocab)
    if limits.top_p is not None:
        top_p = tl.load(limits.top_p + row)
        exact = (1 - top_p).to(tl.float32).to(tl.float64)  # rounded as in the definition
        droppable = tl.where(top_p < 1, exact, -1.0)
    return top_k, droppable


@triton.jit
def _read_pairs(rows, row, index, ids):
    """Pairs of tokens `ids`, MOST for ids outside the vocabulary."""
    x = read_logits(rows, row, index, ids)
    if rows.params.temperature is not None:
        x = tl.div_rn(x, read_temperature(rows, row))
    pair = (to_key(x).to(tl.int64) << 32) | ids
    return tl.where(ids < rows.vocab, pair, MOST)


@triton.jit
def _logits_of(pair):
    return from_key((pair >> 32).to(tl.int32))


@triton.jit
def _weights_of(pair, peak):
    """float32 weights `exp(logit - peak)` of pairs, 0 of MOST."""
    return tl.where(pair < MOST, tl.exp2((_logits_of(pair) - peak) * LOG2_E), 0.0)


@triton.jit
def _masses_of(pair, peak, unit):
    """int64 masses of pairs: their weights as whole numbers of units, rounded down."""
    return (_weights_of(pair, peak) * unit).to(tl.int64)


@triton.jit
def _without_id(pair):
    """The least pair that a token of the same logit can have."""
    return pair >> 32 << 32


@triton.jit
def _bracket_kernel(
    rows,
    limits,
    shortlist,
    partials,
    block: tl.constexpr,
    padded_chunks: tl.constexpr,
    samples: tl.constexpr,
):
    """One program per row: the cutoff of a sample lies near that of the row."""
    row, index = tl.program_id(0), tl.program_id(1)
    top_k, droppable = _read_limits(rows, limits, row)
    temperature = read_temperature(rows, row)
    rate = tl.div_rn(tl.full((), LOG2_E, tl.float32), temperature)
    distribution, _ = merge_row(rows, partials, row, index, rate, block, padded_chunks)
    peak = tl.div_rn(tl.max(distribution[0], axis=0), temperature)
    total = 1 / tl.max(distribution[1], axis=0)

    rank, count = tl.arange(0, samples), tl.minimum(rows.vocab, samples)
    ids = rank * tl.maximum(rows.vocab // samples, 1)
    pair = tl.sort(_read_pairs(rows, row, index, ids))  # ids that are none come last
    mass_below = tl.cumsum(_weights_of(pair, peak), axis=0) * (rows.vocab / count)
    is_dropped = (mass_below <= droppable * total) & (rank < count)
    dropped = tl.sum(is_dropped.to(tl.float32), axis=0)
    if top_k > 0:
        dropped = count - count * (top_k / rows.vocab)
    margin = WIDTH * tl.sqrt(tl.minimum(dropped, count - dropped)) + SLACK
    low = tl.max(tl.where(rank <= dropped - margin, pair, LEAST), axis=0)
    high = tl.min(tl.where(rank >= dropped + margin, pair, MOST), axis=0)
    if top_k > 0:  # all ties of the least key are listed, and all that lies above
        low, high = _without_id(low), tl.full((), MOST, tl.int64)
    elif droppable < 0:  # the row needs no list
        low, high = tl.full((), MOST, tl.int64), tl.full((), LEAST, tl.int64)

    slot = row * rows.num_indices + index
    tl.store(shortlist.peak + slot, peak)
    tl.store(shortlist.bracket + 2 * slot, low)
    tl.store(shortlist.bracket + 2 * slot + 1, high)
    tl.store(shortlist.sums + 4 * slot + tl.arange(0, 4), tl.zeros((4,), tl.int64))


@triton.jit
def _list_kernel(rows, limits, shortlist, block: tl.constexpr):
    """One program per chunk."""
    row, index, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = row * rows.num_indices + index
    low = tl.load(shortlist.bracket + 2 * slot)
    high = tl.load(shortlist.bracket + 2 * slot + 1)
    if low <= high:
        pair = _read_pairs(rows, row, index, chunk * block + tl.arange(0, block))
        is_listed = (pair >= low) & (pair <= high) & (pair < MOST)
        ones, sums = is_listed.to(tl.int32), shortlist.sums + 4 * slot
        first = tl.atomic_add(sums, tl.sum(ones, axis=0).to(tl.int64), sem="relaxed")
        position = first + tl.cumsum(ones, axis=0) - ones
        into = shortlist.pairs + tl.cast(slot, tl.int64) * shortlist.capacity + position
        tl.store(into, pair, mask=is_listed & (position < shortlist.capacity))
        top_k, droppable = _read_limits(rows, limits, row)
        if (top_k == 0) & (droppable >= 0):
            mass = _masses_of(pair, tl.load(shortlist.peak + slot), shortlist.unit)
            below = tl.sum(tl.where(pair < low, mass, 0), axis=0)
            through = tl.sum(tl.where(pair <= high, mass, 0), axis=0)
            tl.atomic_add(sums + 1, below, sem="relaxed")
            tl.atomic_add(sums + 2, through, sem="relaxed")
            tl.atomic_add(sums + 3, tl.sum(mass, axis=0), sem="relaxed")


@triton.jit
def _scan(rows, shortlist, source, least, middle, by_mass: tl.constexpr, part: tl.constexpr):
    """Of the pairs from `least` on: the sum of the weights below `middle`, the largest pair below
    it, and the least of the others.

    The weight of a pair is its mass, or else 1; then ids are ignored, as those of a top-k are.
    `source` is a tuple: the row and its window index; whether the listed pairs are read, or else
    the whole row; their number; and the row's peak.
    """
    row, index, is_listed, count, peak = source
    start = shortlist.pairs
    start += (tl.cast(row, tl.int64) * rows.num_indices + index) * shortlist.capacity
    weight_below = tl.zeros((part,), tl.int64)
    largest, smallest = tl.full((part,), LEAST, tl.int64), tl.full((part,), MOST, tl.int64)
    for first in range(0, count, part):
        i = first + tl.arange(0, part)
        if is_listed:
            pair = tl.load(start + i, mask=i < count, other=MOST)
        else:
            pair = _read_pairs(rows, row, index, i)
        if by_mass:
            weight = _masses_of(pair, peak, shortlist.unit)
        else:
            weight = tl.full((part,), 1, tl.int64)
            pair = tl.where(pair < MOST, _without_id(pair), MOST)
        is_below = (pair >= least) & (pair < middle)
        weight_below += tl.where(is_below, weight, 0)
        largest = tl.maximum(largest, tl.where(is_below, pair, LEAST))
        smallest = tl.minimum(smallest, tl.where(pair >= middle, pair, MOST))
    return tl.sum(weight_below, axis=0), tl.max(largest, axis=0), tl.min(smallest, axis=0)


@triton.jit
def _search(rows, shortlist, source, least, budget, by_mass: tl.constexpr, part: tl.constexpr):
    """The largest pair such that the weights from `least` up to it, exclusive, sum to at most the
    budget. It is the first that is kept.

    A bisection between `low` and `high`, which jump to pairs that exist: about log2(pairs) scans.
    """
    most = tl.full((), MOST, tl.int64)
    _, high, _ = _scan(rows, shortlist, source, least, most, by_mass, part)
    low = tl.minimum(least, high)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up, without overflow
        below, largest, smallest = _scan(rows, shortlist, source, least, middle, by_mass, part)
        fits = below <= budget
        low, high = tl.where(fits, smallest, low), tl.where(fits, high, largest)
    return low


@triton.jit
def _search_kernel(rows, limits, shortlist, cutoff, part: tl.constexpr):
    """One program per row."""
    row, index = tl.program_id(0), tl.program_id(1)
    top_k, droppable = _read_limits(rows, limits, row)
    slot = row * rows.num_indices + index
    peak, sums = tl.load(shortlist.peak + slot), shortlist.sums + 4 * slot
    count, below, through = tl.load(sums), tl.load(sums + 1), tl.load(sums + 2)
    budget = tl.floor(droppable * tl.load(sums + 3).to(tl.float64)).to(tl.int64)
    is_open = tl.load(shortlist.bracket + 2 * slot + 1) == MOST
    is_inside = (below <= budget) & ((budget < through) | is_open)
    is_listed = (count > 0) & (count <= shortlist.capacity)
    is_listed &= tl.where(top_k > 0, count >= top_k, is_inside)
    count = tl.where(is_listed, count, rows.vocab)
    budget -= tl.where(is_listed, below, 0)

    source = row, index, is_listed, count.to(tl.int32), peak
    least = tl.full((), LEAST, tl.int64)
    logit, token = tl.full((), -INFINITY, tl.float32), tl.full((), 0, tl.int64)
    if top_k > 0:
        least = _search(rows, shortlist, source, least, count - top_k, False, part)
    if droppable >= 0:
        if top_k > 0:
            most = tl.full((), MOST, tl.int64)
            total, _, _ = _scan(rows, shortlist, source, least, most, True, part)
            budget = tl.floor(droppable * total.to(tl.float64)).to(tl.int64)
        least = _search(rows, shortlist, source, least, budget, True, part)
    if (top_k > 0) | (droppable >= 0):
        logit, token = _logits_of(least), least & 0xFFFFFFFF
    if limits.min_p is not None:
        bound = peak + tl.log(tl.load(limits.min_p + row).to(tl.float32))
        token = tl.where(bound > logit, 0, token)
        logit = tl.maximum(logit, bound)
    tl.store(cutoff.logits + slot, logit)
    tl.store(cutoff.ids + slot, token)
