"""`find_cutoff` on a GPU: a bisection over the pairs (logit, id) of a row, of few candidates.

A pair is one int64, `key << 32 | id`, where `key` is an int32 in the order of the scaled logits.
Pairs are in the order in which tokens are dropped, and no two are equal, so ties need no case of
their own. The mass of a token is a whole number of units, so sums are exact in any order.

Four launches: softmax partials; `_guess_kernel` guesses from a sorted sample of the row between
which pairs the cutoff lies; `_list_kernel` lists the pairs there, the candidates, and sums the
masses below them; and `_search_kernel` bisects the list. If the cutoff is not in the list, or the
list is longer than its memory, the whole row is bisected instead: the guess changes the running
time, never the result. A list of usual length is read once and bisected in registers.

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
    merge_partials,
    read_logits,
    read_temperature,
    rows_of,
    softmax_partials,
    to_key,
)
from specdec.kernels.types import Cutoff, FilterParams, Truncation

BLOCK, NUM_WARPS = 4096, 8
SAMPLES, SAMPLE_WARPS = 2048, 8
PART, HELD, SEARCH_WARPS = 4096, 8192, 16
WIDTH = tl.constexpr(4.0)  # standard deviations of a sampled token's rank
SLACK = tl.constexpr(8.0)  # ranks, where that deviation is near 0
LEAST = tl.constexpr(-(2**63))  # below every pair
MOST = tl.constexpr(2**63 - 1)  # above every pair


class Candidates(NamedTuple):
    """The pairs of each row among which its cutoff is searched; `[B, N]` if not said otherwise."""

    peak: Tensor  # float32, the row's largest scaled logit
    mass: Tensor  # float32, the row's sum of exp(logit - peak)
    low: Tensor  # int64, the least pair that is listed
    high: Tensor  # int64, the largest pair that is listed
    count: Tensor  # int64, how many pairs lie from low to high
    below: Tensor  # int64, the mass below low
    through: Tensor  # int64, the mass up to high
    pairs: Tensor  # [B, N, capacity] int64, the list, in any order
    capacity: int  # how many pairs can be listed
    unit: float  # the number of units in the mass of a most likely token


class TruncateTables(NamedTuple):
    """All tables of a search, as one kernel argument."""

    rows: Rows
    limits: Truncation
    candidates: Candidates


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
    held: int = HELD,
) -> Cutoff:
    """As the definition, with exact sums where that rounds them.

    Args:
        logits, temperature, truncation: as of the definition.
        block: tokens of a chunk, a power of two.
        num_warps: of a program that reads a chunk.
        samples: tokens of a sample, a power of two.
        capacity: how many pairs can be listed; `None` is a quarter of V.
        part: pairs that the search reads at a time, a power of two.
        held: length up to which a list is bisected in registers, a power of two.
    """
    at = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    cutoff = Cutoff(at, torch.empty_like(at, dtype=torch.long))
    if not at.numel():
        return cutoff
    window = logits[:, None] if logits.dim() == 2 else logits
    shape, rows = window.shape[:2], rows_of(window, FilterParams(temperature))
    limits = Truncation(*(None if t is None else t.contiguous() for t in truncation[:3]))
    t = TruncateTables(rows, limits, _new_candidates(rows, capacity or triton.cdiv(rows.vocab, 4)))
    with torch.cuda.device_of(logits):
        partials = softmax_partials(rows, block=block, num_warps=num_warps)
        sizes = {"padded_chunks": triton.next_power_of_2(partials.num_chunks), "samples": samples}
        _guess_kernel[shape](t, partials, **sizes, num_warps=SAMPLE_WARPS, **NO_FUSION)
        chunks = *shape, partials.num_chunks
        _list_kernel[chunks](t, block=block, num_warps=num_warps, **NO_FUSION)
        sizes = {"part": part, "held": held}
        _search_kernel[shape](t, cutoff, **sizes, num_warps=SEARCH_WARPS, **NO_FUSION)
    return cutoff


def _new_candidates(rows: Rows, capacity: int) -> Candidates:
    shape, device = rows.logits.data.shape[:2], rows.logits.data.device
    peak, mass = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    pairs = torch.empty(*shape, capacity, dtype=torch.long, device=device)
    numbers = (torch.empty_like(peak, dtype=torch.long) for _ in range(5))
    unit = 2.0 ** (62 - rows.vocab.bit_length())  # V tokens of mass 1 sum to less than 2**62
    return Candidates(peak, mass, *numbers, pairs, capacity, unit)


@triton.jit
def _read_limits(t, row):
    """top_k, at most V, 0 for all; and the mass that top-p may drop, float64, -1 for none."""
    top_k, droppable = tl.full((), 0, tl.int64), tl.full((), -1.0, tl.float64)
    if t.limits.top_k is not None:
        top_k = tl.minimum(tl.load(t.limits.top_k + row), t.rows.vocab)
    if t.limits.top_p is not None:
        top_p = tl.load(t.limits.top_p + row)
        rounded = (1 - top_p).to(tl.float32).to(tl.float64)  # as the definition rounds it
        droppable = tl.where(top_p < 1, rounded, -1.0)
    return top_k, droppable


@triton.jit
def _read_pairs(rows, row, index, ids):
    """Pairs of tokens `ids`, MOST for ids outside the vocabulary."""
    x = read_logits(rows, row, index, ids)
    if rows.params.temperature is not None:
        x = tl.div_rn(x, read_temperature(rows, row))
    return tl.where(ids < rows.vocab, (to_key(x).to(tl.int64) << 32) | ids, MOST)


@triton.jit
def _logit_of(pair):
    return from_key((pair >> 32).to(tl.int32))


@triton.jit
def _weight_of(pair, peak):
    """float32 `exp(logit - peak)`, 0 of MOST."""
    return tl.where(pair < MOST, tl.exp2((_logit_of(pair) - peak) * LOG2_E), 0.0)


@triton.jit
def _without_id(pair):
    """The least pair of the same logit; MOST stays."""
    return tl.where(pair < MOST, pair >> 32 << 32, MOST)


@triton.jit
def _guess_kernel(t, partials, padded_chunks: tl.constexpr, samples: tl.constexpr):
    """One program per row: the cutoff of the row lies near that of a sample."""
    row, index = tl.program_id(0), tl.program_id(1)
    top_k, droppable = _read_limits(t, row)
    one = index + tl.arange(0, 1)
    row_max, row_sum, _ = merge_partials(t.rows, partials, row, one, index, padded_chunks)
    peak = tl.div_rn(tl.max(row_max, axis=0), read_temperature(t.rows, row))
    mass = tl.sum(row_sum, axis=0)

    rank, count = tl.arange(0, samples), tl.minimum(t.rows.vocab, samples)
    ids = rank * tl.maximum(t.rows.vocab // samples, 1)
    pair = tl.sort(_read_pairs(t.rows, row, index, ids))  # those of no token come last
    mass_below = tl.cumsum(_weight_of(pair, peak), axis=0) * (t.rows.vocab / count)
    is_dropped = (mass_below <= droppable * mass) & (rank < count)
    dropped = tl.sum(is_dropped.to(tl.float32), axis=0)
    if top_k > 0:
        dropped = count - count * (top_k / t.rows.vocab)
    margin = WIDTH * tl.sqrt(tl.minimum(dropped, count - dropped)) + SLACK
    low = tl.max(tl.where(rank <= dropped - margin, pair, LEAST), axis=0)
    high = tl.min(tl.where(rank >= dropped + margin, pair, MOST), axis=0)
    if top_k > 0:  # with all ties of the least logit, and all that lies above
        low, high = _without_id(low), tl.full((), MOST, tl.int64)
    elif droppable < 0:  # the row needs no list
        low, high = tl.full((), MOST, tl.int64), tl.full((), LEAST, tl.int64)

    entry, c = row * t.rows.num_indices + index, t.candidates
    tl.store(c.peak + entry, peak)
    tl.store(c.mass + entry, mass)
    tl.store(c.low + entry, low)
    tl.store(c.high + entry, high)
    tl.store(c.count + entry, 0)
    tl.store(c.below + entry, 0)
    tl.store(c.through + entry, 0)


@triton.jit
def _list_kernel(t, block: tl.constexpr):
    """One program per chunk. Its atomic additions are of whole numbers, so their order does not
    matter.
    """
    row, index, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry, c = row * t.rows.num_indices + index, t.candidates
    low, high = tl.load(c.low + entry), tl.load(c.high + entry)
    if low <= high:
        pair = _read_pairs(t.rows, row, index, chunk * block + tl.arange(0, block))
        is_listed = (pair >= low) & (pair <= high) & (pair < MOST)
        ones = is_listed.to(tl.int32)
        count = tl.sum(ones, axis=0).to(tl.int64)
        first = tl.atomic_add(c.count + entry, count, sem="relaxed")
        position = first + tl.cumsum(ones, axis=0) - ones
        into = c.pairs + tl.cast(entry, tl.int64) * c.capacity + position
        tl.store(into, pair, mask=is_listed & (position < c.capacity))
        top_k, droppable = _read_limits(t, row)
        if (top_k == 0) & (droppable >= 0):
            mass = (_weight_of(pair, tl.load(c.peak + entry)) * c.unit).to(tl.int64)
            below = tl.sum(tl.where(pair < low, mass, 0), axis=0)
            through = tl.sum(tl.where(pair <= high, mass, 0), axis=0)
            tl.atomic_add(c.below + entry, below, sem="relaxed")
            tl.atomic_add(c.through + entry, through, sem="relaxed")


@triton.jit
def _scan(t, source, least, middle, by_mass: tl.constexpr, part: tl.constexpr):
    """Of the pairs from `least` on: the sum of the weights below `middle`, the largest pair below
    it, and the least of the others. Weights are masses; or else 1, and then ids are ignored.

    `source` is a tuple: the row and its window index; whether the list is read, or the whole row;
    the number of its pairs; and the row's peak.
    """
    row, index, is_listed, count, peak = source
    entry = tl.cast(row, tl.int64) * t.rows.num_indices + index
    weight_below = tl.zeros((part,), tl.int64)
    largest, smallest = tl.full((part,), LEAST, tl.int64), tl.full((part,), MOST, tl.int64)
    for first in range(0, count, part):
        i = first + tl.arange(0, part)
        if is_listed:
            start = t.candidates.pairs + entry * t.candidates.capacity
            pair = tl.load(start + i, mask=i < count, other=MOST)
        else:
            pair = _read_pairs(t.rows, row, index, i)
        if by_mass:
            weight = (_weight_of(pair, peak) * t.candidates.unit).to(tl.int64)
        else:
            weight, pair = tl.full((part,), 1, tl.int64), _without_id(pair)
        is_below = (pair >= least) & (pair < middle)
        weight_below += tl.where(is_below, weight, 0)
        largest = tl.maximum(largest, tl.where(is_below, pair, LEAST))
        smallest = tl.minimum(smallest, tl.where(pair >= middle, pair, MOST))
    return tl.sum(weight_below, axis=0), tl.max(largest, axis=0), tl.min(smallest, axis=0)


@triton.jit
def _search(t, source, least, budget, by_mass: tl.constexpr, part: tl.constexpr):
    """The largest pair such that the weights from `least` up to it, exclusive, sum to at most the
    budget: the first that is kept.

    A bisection between `low` and `high`, which jump to pairs that exist: about log2(pairs) scans.
    """
    most = tl.full((), MOST, tl.int64)
    _, high, _ = _scan(t, source, least, most, by_mass, part)
    low = tl.minimum(least, high)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up, without overflow
        below, largest, smallest = _scan(t, source, least, middle, by_mass, part)
        fits = below <= budget
        low, high = tl.where(fits, smallest, low), tl.where(fits, high, largest)
    return low


@triton.jit
def _search_held(pair, weight, least, budget):
    """As `_search`, of pairs and weights in registers."""
    is_open = pair >= least
    low = tl.min(tl.where(is_open, pair, MOST), axis=0)
    high = tl.max(tl.where(is_open & (pair < MOST), pair, LEAST), axis=0)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)
        is_below = is_open & (pair < middle)
        fits = tl.sum(tl.where(is_below, weight, 0), axis=0) <= budget
        largest = tl.max(tl.where(is_below, pair, LEAST), axis=0)
        smallest = tl.min(tl.where(pair >= middle, pair, MOST), axis=0)
        low, high = tl.where(fits, smallest, low), tl.where(fits, high, largest)
    return low


@triton.jit
def _find_held(t, entry, count, peak, top_k, droppable, budget, held: tl.constexpr):
    """The first pair that is kept, of a list of at most `held` pairs."""
    i = tl.arange(0, held)
    pairs = t.candidates.pairs + tl.cast(entry, tl.int64) * t.candidates.capacity
    pair = tl.load(pairs + i, mask=i < count, other=MOST)
    least = tl.full((), LEAST, tl.int64)
    if top_k > 0:
        ones = (i < count).to(tl.int64)
        least = _search_held(_without_id(pair), ones, least, count - top_k)
    if droppable >= 0:
        mass = (_weight_of(pair, peak) * t.candidates.unit).to(tl.int64)
        if top_k > 0:
            kept = tl.sum(tl.where(pair >= least, mass, 0), axis=0)
            budget = tl.floor(droppable * kept.to(tl.float64)).to(tl.int64)
        least = _search_held(pair, mass, least, budget)
    return least


@triton.jit
def _find(t, source, top_k, droppable, budget, part: tl.constexpr):
    """The first pair that is kept, of a list or a row of any length."""
    count = source[3]
    least = tl.full((), LEAST, tl.int64)
    if top_k > 0:
        least = _search(t, source, least, count - top_k, False, part)
    if droppable >= 0:
        if top_k > 0:
            mass, _, _ = _scan(t, source, least, tl.full((), MOST, tl.int64), True, part)
            budget = tl.floor(droppable * mass.to(tl.float64)).to(tl.int64)
        least = _search(t, source, least, budget, True, part)
    return least


@triton.jit
def _search_kernel(t, cutoff, part: tl.constexpr, held: tl.constexpr):
    """One program per row."""
    row, index = tl.program_id(0), tl.program_id(1)
    entry, c = row * t.rows.num_indices + index, t.candidates
    top_k, droppable = _read_limits(t, row)
    peak, count, below = tl.load(c.peak + entry), tl.load(c.count + entry), tl.load(c.below + entry)
    budget = tl.floor(droppable * tl.load(c.mass + entry) * c.unit).to(tl.int64)
    is_open = tl.load(c.high + entry) == MOST
    is_inside = (below <= budget) & ((budget < tl.load(c.through + entry)) | is_open)
    is_listed = (count > 0) & (count <= c.capacity)
    is_listed &= tl.where(top_k > 0, count >= top_k, is_inside)
    count = tl.where(is_listed, count, t.rows.vocab)
    budget -= tl.where(is_listed, below, 0)

    logit, token = tl.full((), -INFINITY, tl.float32), tl.full((), 0, tl.int64)
    if (top_k > 0) | (droppable >= 0):
        if is_listed & (count <= held):
            least = _find_held(t, entry, count, peak, top_k, droppable, budget, held)
        else:
            source = row, index, is_listed, count.to(tl.int32), peak
            least = _find(t, source, top_k, droppable, budget, part)
        logit, token = _logit_of(least), least & 0xFFFFFFFF
    if t.limits.min_p is not None:
        lowest = peak + tl.log(tl.load(t.limits.min_p + row).to(tl.float32))
        token = tl.where(lowest > logit, 0, token)
        logit = tl.maximum(logit, lowest)
    tl.store(cutoff.logits + entry, logit)
    tl.store(cutoff.ids + entry, token)
