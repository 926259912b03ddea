"""Device functions that the kernels share: the laws of rows, computed chunk by chunk.

A row of V logits is cut into C chunks. `measure` reduces a chunk to its largest logit and the sum
of its weights; `combine` reduces the chunks of a row to the row's largest logit and scale. `weigh`
then gives a token's probability from its logit: the same float32 number wherever a launch computes
it, so what weighs nothing in a sum is never drawn. Kernels that do so multiply and add apart.

Legend: B rows, N places of a window, V vocabulary, C chunks, P places padded to a power of two.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gate import Gate
from specdec.kernels.triton_launch import SHARED, read_pairs, wait_for_last, write
from specdec.kernels.triton_laws import INFINITY, pass_gate, point_to, read_gate

MIN_PROGRAMS = 512  # about 4 for each multiprocessor of a large GPU


class Measures(NamedTuple):
    """What is known of each chunk of each row; a kernel takes it as one argument.

    Args:
        largest: float32 largest logits of `[B, N, C]` chunks.
        weight: float32 sums of their weights relative to the chunk's largest.
        best: int32 ids of the largest; `None` without greedy rows.
        chunks: C.
    """

    largest: Tensor
    weight: Tensor
    best: Tensor | None
    chunks: int


def find_span(rows: int, chunks: int, largest: int) -> int:
    """Chunks per program, a power of two: up to `largest` where that leaves enough programs to fill
    a GPU.
    """
    span = 1
    while 2 * span <= min(largest, rows * chunks // MIN_PROGRAMS):
        span *= 2
    return span


def new_measures(logits: Tensor, gate: Gate, block: int) -> Measures:
    """Tables for chunks of `block` tokens of logits `[B, N, V]`, not filled."""
    shape = *logits.shape[:2], triton.cdiv(logits.shape[2], block)
    largest = torch.empty(shape, dtype=torch.float32, device=logits.device)
    best = None
    if gate.is_greedy is not None:
        best = torch.empty(shape, dtype=torch.int32, device=logits.device)
    return Measures(largest, torch.empty_like(largest), best, shape[2])


@triton.jit
def _sum_up(laws, gate, ids, x):
    """What each thread knows of its logits `[pieces, threads, side]`: the largest, the sum of
    `exp2((logit - largest) * rate)`, and with greedy rows the first id of the largest.
    """
    x = pass_gate(laws, gate, ids, x)
    largest = tl.max(tl.max(x, axis=2), axis=0)
    best = tl.full(largest.shape, 0, tl.int32)
    if laws.gate.is_greedy is not None:
        first = tl.where(x == largest[None, :, None], ids, laws.vocab - 1)
        best = tl.min(tl.min(first, axis=2), axis=0)
    origin = tl.where(largest == -INFINITY, 0.0, largest)[None, :, None]
    weight = tl.sum(tl.sum(tl.exp2((x - origin) * gate[0]), axis=2), axis=0)
    return largest, weight, best


@triton.jit
def measure(
    measures,
    laws,
    row,
    place,
    chunk,
    is_early: tl.constexpr,
    block: tl.constexpr,
    threads: tl.constexpr,
):
    """Tells a chunk's largest logit, and its sum of `exp2((logit - largest) * rate)`: 0 where
    nothing is kept, NaN where a logit is NaN or +inf; with greedy rows the id of the largest too.

    Each thread reads pieces of what lies side by side, and threads meet at the end only. Where the
    call `is_early`, it reads while the tables are cleared and waits before it writes.
    """
    wide: tl.constexpr = threads * 128 // laws.logits.dtype.element_ty.primitive_bitwidth
    piece: tl.constexpr = wide if wide < block else block
    parts: tl.constexpr = threads if threads < piece else piece
    shape: tl.constexpr = (block // piece, parts, piece // parts)
    start = point_to(laws.logits, row, place, laws.row_stride, laws.place_stride)
    gate = read_gate(laws, row, place)
    ids = tl.arange(0, block // piece)[:, None] * piece + tl.arange(0, piece)[None]
    ids += chunk * block
    cache: tl.constexpr = SHARED if is_early else ""
    if (chunk + 1) * block <= laws.vocab:  # without masks
        x = tl.load(start + ids, cache_modifier=cache)
    else:
        x = tl.load(start + ids, mask=ids < laws.vocab, other=-INFINITY, cache_modifier=cache)
    ids, x = tl.reshape(ids, shape), tl.reshape(x, shape)
    largest, weight, best = _sum_up(laws, gate, ids, x)
    peak = tl.max(largest, axis=0)
    weight *= tl.exp2((largest - tl.where(peak == -INFINITY, 0.0, peak)) * gate[0])
    slot = tl.cast(row * laws.places + place, tl.int64) * measures.chunks + chunk
    wait_for_last(is_early)
    write(measures.largest + slot, peak)
    write(measures.weight + slot, tl.sum(weight, axis=0))
    if laws.gate.is_greedy is not None:
        best = tl.where(largest == peak, best, laws.vocab - 1)
        write(measures.best + slot, tl.min(best, axis=0))


@triton.jit
def weigh(laws, rate, law, factor, ids, x):
    """Probabilities times a factor of tokens `ids` from their logits behind the gate, `law` of
    `combine`; a GPU makes 0 of those below 2**-126.
    """
    largest, scale, best = law
    probs = tl.exp2((x - largest) * rate) * (scale * factor)
    if laws.gate.is_greedy is not None:
        probs = tl.where(best < 0, probs, tl.where(ids == best, factor, 0.0))
    return probs


@triton.jit
def combine(
    measures,
    laws,
    row,
    place,
    last,
    rate,
    block: tl.constexpr,
    padded_chunks: tl.constexpr,
    is_awaited: tl.constexpr,
):
    """The laws of a row's places `[P]`, and the probabilities of their chunks, `[P, C]` float64.
    Measures that this launch makes must be awaited.

    A law is a tuple: the largest logit, the scale (1 / sum of weights, NaN where the logits are no
    law, and beyond place `last`), and the token of a one-hot law or -1.
    """
    chunk = tl.arange(0, padded_chunks)[None]
    slots = tl.cast(row * laws.places + place, tl.int64)[:, None] * measures.chunks + chunk
    is_chunk = (chunk < measures.chunks) & (place <= last)[:, None]
    if is_awaited:
        maxima, weight = read_pairs(measures.largest + slots, measures.weight + slots, is_chunk)
    else:
        maxima = tl.load(measures.largest + slots, is_chunk, 0.0)
        weight = tl.load(measures.weight + slots, is_chunk, 0.0)
    maxima = tl.where(is_chunk, maxima, -INFINITY)
    largest = tl.max(maxima, axis=1)
    peaks = tl.exp2((maxima - largest[:, None]) * rate)  # NaN where nothing is finite
    total = tl.sum(weight * peaks, axis=1)
    scale = tl.where(total > 0, tl.div_rn(1.0, total), float("nan"))
    is_empty = peaks * scale[:, None] == 0  # no token of the chunk is above 0 in float32
    shares = tl.where(is_empty, 0.0, weight * peaks * scale[:, None]).to(tl.float64)
    best = tl.full(place.shape, -1, tl.int32)
    if laws.gate.is_greedy is not None:
        if is_awaited:
            firsts, _ = read_pairs(measures.best + slots, measures.best + slots, is_chunk)
        else:
            firsts = tl.load(measures.best + slots, is_chunk, 0)
        firsts = tl.where(maxima == largest[:, None], firsts, laws.vocab - 1)
        best = tl.where(tl.load(laws.gate.is_greedy + row), tl.min(firsts, axis=1), -1)
        is_hot = (chunk == (best // block)[:, None]).to(tl.float64)
        shares = tl.where((best < 0)[:, None], shares, is_hot)
    return (largest, scale, best), shares


@triton.jit
def pick_law(laws, index, place):
    """The law of one place."""
    largest, scale, best = laws
    return pick(largest, index, place), pick(scale, index, place), pick(best, index, place)


@triton.jit
def pick(values, index, place):
    """The value of one place, of `[P]` or `[P, C]` values."""
    is_it = index == place
    if len(values.shape) == 2:
        is_it = is_it[:, None]
    return tl.sum(tl.where(is_it, values, 0), axis=0)


@triton.jit
def add_both(one, two, other_one, other_two):
    """For `tl.reduce`: two sums at once."""
    return one + other_one, two + other_two


@triton.jit
def _first_of(rank, value, other_rank, other_value):
    is_first = rank <= other_rank
    return tl.where(is_first, rank, other_rank), tl.where(is_first, value, other_value)


@triton.jit
def find_past(weights, threshold, length: tl.constexpr):
    """The first index whose cumulative weight, float64, exceeds the threshold, never one of weight
    0, and the weight before it. Rounding may leave none: then the last index of positive weight;
    length, and nothing of use before it, where there is none either.
    """
    index = tl.arange(0, length)
    is_positive = weights > 0  # asked for, since a parallel prefix sum is not flat over zeros
    sums = tl.cumsum(weights, axis=0)
    is_past = (sums > threshold) & is_positive
    rank = tl.where(is_past, index, tl.where(is_positive, 2 * length - index, 3 * length))
    best, before = tl.reduce((rank, sums - weights), 0, _first_of)
    found = tl.where(best < length, best, tl.maximum(2 * length - best, -1))
    return tl.where(found < 0, length, found), before
