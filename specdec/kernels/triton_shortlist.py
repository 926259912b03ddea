"""Device functions that list the tokens of a row among which its floor lies.

A few tokens of a row, a sample, tell between which logits the floor must be. The sample may mislead
and the list may be too short for what is between them; whoever reads it checks both.

Legend: B rows, N places of a window, V vocabulary, C chunks of a row; a spot is row * N + place,
R = B * N of them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_laws import INFINITY, LOG2_E, find_ties, from_key, to_key
from specdec.kernels.triton_rows import Measures, add_both

RUN = tl.constexpr(4)  # neighbours that are sampled together, since memory is read in sectors
GROUP = tl.constexpr(8)  # neighbours that are told by one number of as many bits
WIDTH = tl.constexpr(5.0)  # standard errors that a sample may be off
LEAST_KEY = tl.constexpr(-0x7F80)  # of -inf, in 16 bits
STAGES = tl.constexpr(3)  # chunks on their way


class Shortlist(NamedTuple):
    """What is known of each row; a kernel takes it as one argument.

    Args:
        bracket: `[R, 2]` float32, the least and the largest logit that are listed.
        total: `[R]` float64, the mass of all tokens, that of the largest being 1.
        peak: `[R]` float32, the largest logit, of rows that are measured.
        found: `[R, C]` float32, of each program that lists, the mass below the bracket; or its
            largest logit, where that was not measured.
        tokens: `[R, most]` int32, the tokens listed, in any order.
        keys: `[R, most]` int32, their scaled logits, as integers of the same order.
        masses: `[R, most]` int64, their masses as whole numbers.
        counters: `[R, 4]` int32, the visits, first and second, that are done, 1 once the bracket is
            there, and how many tokens are in it.
        most: how many tokens can be listed.
        unit: the number that stands for mass 1.
    """

    bracket: Tensor
    total: Tensor
    peak: Tensor
    found: Tensor
    tokens: Tensor
    keys: Tensor
    masses: Tensor
    counters: Tensor
    most: int
    unit: float


def new_shortlist(measures: Measures, most: int, vocab: int) -> Shortlist:
    """Tables that are not filled, and counters at 0."""
    like, spots = measures.largest, measures.largest.shape[:2].numel()
    tokens = like.new_empty(spots, most, dtype=torch.int32)
    return Shortlist(
        like.new_empty(spots, 2),
        like.new_empty(spots, dtype=torch.float64),
        like.new_empty(spots),
        torch.empty_like(like),
        tokens,
        torch.empty_like(tokens),
        torch.empty_like(tokens, dtype=torch.long),
        tokens.new_zeros(spots, 4),
        most,
        2.0 ** (62 - vocab.bit_length()),
    )


@triton.jit
def _read_peak(measures, spot, padded_chunks: tl.constexpr):
    """A row's largest logit, and the masses of its chunks before they are brought to it."""
    chunk = tl.arange(0, padded_chunks)
    slots = tl.cast(spot, tl.int64) * measures.chunks + chunk
    maxima = tl.load(measures.largest + slots, chunk < measures.chunks, -INFINITY)
    return tl.max(maxima, axis=0), maxima, slots


@triton.jit
def _read_sample(start, vocab, samples: tl.constexpr):
    """Logits of tokens that lie evenly in a row, -inf where there are not so many; and how many
    tokens one of them stands for.
    """
    index = tl.arange(0, samples)
    stride = tl.maximum(tl.cast(vocab, tl.int64) * RUN // samples, RUN)
    ids = index // RUN * stride + index % RUN
    x = tl.load(start + ids, mask=ids < vocab, other=-INFINITY).to(tl.float32)
    return x, vocab / tl.minimum(vocab, samples).to(tl.float32)


@triton.jit
def _find_least(key, weight, budget, is_measured):
    """The largest key, in 16 bits, below which the sample surely weighs at most the budget; and by
    how much that weight may be off. If a row is not measured, what is not below weighs at least it.
    """
    least = tl.full((), -(2**15), tl.int32)
    error = tl.full((), 0.0, tl.float32)
    square = weight * weight
    for bit in tl.static_range(16):
        low = least + (2**15 >> bit)
        is_in = (key < low) == is_measured
        parts = tl.where(is_in, weight, 0.0), tl.where(is_in, square, 0.0)
        mass, squares = tl.reduce(parts, 0, add_both)
        off = WIDTH * tl.sqrt(squares)
        fits = tl.where(is_measured, mass + off <= budget, mass - off >= budget)
        least, error = tl.where(fits, low, least), tl.where(fits, off, error)
    return least, error


@triton.jit
def _find_last(key, weight, budget):
    """The largest key, in 16 bits, below which the sample weighs at most the budget."""
    last = tl.full((), -(2**15), tl.int32)
    for bit in tl.static_range(16):
        high = last + (2**15 >> bit)
        mass = tl.sum(tl.where(key < high, weight, 0.0), axis=0)
        last = tl.where(mass <= budget, high, last)
    return last


@triton.jit
def bracket(laws, measures, shortlist, start, spot, demand, samples, padded_chunks):
    """Chooses which logits to list: of rows that are measured those at which the mass below may be
    the tail, of others those that may be the largest `top_k`.
    """
    top_k, tail, _, temperature, is_measured = demand
    x, each = _read_sample(start, laws.vocab, samples)
    key, budget = to_key(x) >> 16, top_k.to(tl.float32)
    weight = tl.full((samples,), 1.0, tl.float32) * each
    if is_measured:
        rate = tl.div_rn(tl.full((), LOG2_E, tl.float32), temperature)
        peak, maxima, slots = _read_peak(measures, spot, padded_chunks)
        masses = tl.load(measures.weight + slots, maxima > -INFINITY, 0.0)
        total = tl.sum((masses * tl.exp2((maxima - peak) * rate)).to(tl.float64), axis=0)
        tl.store(shortlist.total + spot, total)
        tl.store(shortlist.peak + spot, peak)
        weight = tl.exp2((x - peak) * rate) * each
        budget = (tail * total).to(tl.float32)
    least, error = _find_least(key, weight, budget, is_measured)
    last = tl.full((), -LEAST_KEY, tl.int32)
    if is_measured:  # the error grows with the logits
        last = _find_last(key, weight, budget + 1.5 * error)
    is_open = last >= -LEAST_KEY - 1
    least = from_key(tl.maximum(least, LEAST_KEY) << 16, tl.float32)
    last = from_key((tl.minimum(last, -LEAST_KEY - 1) + 1 << 16) - 1, tl.float32)
    least, _ = find_ties(tl.div_rn(least, temperature), temperature)
    _, last = find_ties(tl.div_rn(last, temperature), temperature)
    tl.store(shortlist.bracket + 2 * spot, least)
    tl.store(shortlist.bracket + 2 * spot + 1, tl.where(is_open, INFINITY, last))


@triton.jit
def _count_bits(x):
    """How many of the 8 lowest bits are 1, the others being 0."""
    x -= (x >> 1) & 0x55
    x = (x & 0x33) + ((x >> 2) & 0x33)
    return (x + (x >> 4)) & 0x0F


@triton.jit
def _list(shortlist, spot, first, ids, x, vocab, row, sums):
    """Lists the tokens of a chunk that are in the bracket; returns the sums of a program so far,
    that of this chunk included.
    """
    is_measured, rate, peak, least, last = row
    x = x.to(tl.float32)
    if is_measured:
        sums += tl.where(x < least, tl.exp2((x - peak) * rate), 0.0)
    else:
        sums = tl.maximum(sums, x)
    # Of a group a number tells which tokens are in, so what follows is of an eighth of the size.
    is_in = (x >= least) & (x <= last) & (ids < vocab)
    group = tl.sum(tl.where(is_in, 1 << (ids % GROUP), 0), axis=1)
    count = _count_bits(group)
    index = tl.cumsum(count, axis=0) - count
    counter = shortlist.counters + 4 * spot + 3
    index += tl.atomic_add(counter, tl.sum(count, axis=0), sem="relaxed")
    into = shortlist.tokens + tl.cast(spot, tl.int64) * shortlist.most
    for _ in tl.static_range(GROUP):
        lowest = group & -group
        place = ((lowest & 0xAA) > 0).to(tl.int32) + 2 * ((lowest & 0xCC) > 0).to(tl.int32)
        place += 4 * ((lowest & 0xF0) > 0).to(tl.int32)
        tl.store(into + index, first + place, mask=(group > 0) & (index < shortlist.most))
        group, index = group & (group - 1), index + 1
    return sums


@triton.jit
def list_span(laws, measures, shortlist, start, spot, demand, item, span, block: tl.constexpr):
    """Lists what is in the bracket in `span` chunks, and stores their mass below the bracket; or
    their largest logit, where that was not measured.
    """
    rate = tl.div_rn(tl.full((), LOG2_E, tl.float32), demand[3])
    peak, is_measured = tl.load(shortlist.peak + spot), demand[4]
    least = tl.load(shortlist.bracket + 2 * spot)
    row = is_measured, rate, peak, least, tl.load(shortlist.bracket + 2 * spot + 1)
    first, whole = item * span, laws.vocab // block
    last = tl.minimum(first + span, measures.chunks)
    groups = tl.arange(0, block // GROUP) * GROUP
    ids = groups[:, None] + tl.arange(0, GROUP)[None]
    sums = tl.zeros_like(ids).to(tl.float32) + tl.where(is_measured, 0.0, -INFINITY)
    for chunk in tl.range(first, tl.minimum(last, whole), num_stages=STAGES):
        x, origin = tl.load(start + chunk * block + ids), chunk * block
        sums = _list(shortlist, spot, origin + groups, origin + ids, x, laws.vocab, row, sums)
    if last > whole:
        ids += whole * block
        x = tl.load(start + ids, mask=ids < laws.vocab, other=-INFINITY)
        sums = _list(shortlist, spot, whole * block + groups, ids, x, laws.vocab, row, sums)
    found = tl.max(tl.max(sums, axis=1), axis=0)
    if is_measured:
        found = tl.sum(tl.sum(sums, axis=1), axis=0)
    tl.store(shortlist.found + tl.cast(spot, tl.int64) * measures.chunks + item, found)
