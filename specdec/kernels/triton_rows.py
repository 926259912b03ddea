"""Device functions that the kernels share: the laws of rows, computed chunk by chunk.

A row of V logits is cut into C chunks, and a program reads a span of them. `measure` reduces a
chunk to its largest logit and the sum of its weights; `combine` reduces the chunks of a row to the
row's largest logit and scale. `weigh` then gives a token's probability from its logit: the same
float32 number wherever it is computed, so two equal laws subtract to exactly 0.

Legend: B rows, N places of a window, V vocabulary, C chunks, P places padded to a power of two.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gate import Gate
from specdec.kernels.triton_laws import INFINITY, pass_gate, point_to, read_gate

MIN_PROGRAMS = 1024
STAGES = tl.constexpr(3)


class Measures(NamedTuple):
    """What is known of each chunk of each row; a kernel takes it as one argument.

    Args:
        largest: `[B, N, C]` float32 largest logits.
        weight: `[B, N, C]` float32 sums of weights relative to the chunk's largest.
        best: `[B, N, C]` int32 ids of the largest; `None` without greedy rows.
        chunks: C.
    """

    largest: Tensor
    weight: Tensor
    best: Tensor | None
    chunks: int


def find_span(rows: int, chunks: int, largest: int) -> int:
    """Chunks per program: up to `largest` where that leaves enough programs to fill a GPU."""
    return max(1, min(largest, rows * chunks // MIN_PROGRAMS))


def new_measures(logits: Tensor, gate: Gate, block: int) -> Measures:
    """Tables for chunks of `block` tokens of logits `[B, N, V]`, not filled."""
    shape = *logits.shape[:2], triton.cdiv(logits.shape[2], block)
    largest = torch.empty(shape, dtype=torch.float32, device=logits.device)
    best = None
    if gate.is_greedy is not None:
        best = torch.empty(shape, dtype=torch.int32, device=logits.device)
    return Measures(largest, torch.empty_like(largest), best, shape[2])


@triton.jit
def measure(measures, laws, gate, slot, ids, x):
    """Stores a chunk's largest logit, and its sum of `exp2((logit - largest) * rate)`: 0 where
    nothing is kept, NaN where a logit is NaN or +inf; with greedy rows the id of the largest too.
    """
    x = pass_gate(laws, gate, ids, x)
    largest = tl.max(x, axis=0)
    origin = tl.where(largest == -INFINITY, 0.0, largest)
    tl.store(measures.largest + slot, largest)
    tl.store(measures.weight + slot, tl.sum(tl.exp2((x - origin) * gate[0]), axis=0))
    if laws.gate.is_greedy is not None:
        first = tl.min(tl.where(x == largest, ids, laws.vocab - 1), axis=0)
        tl.store(measures.best + slot, first)


@triton.jit
def measure_span(measures, laws, row, place, first, span, block: tl.constexpr):
    """Measures `span` chunks from the first on. Copies of the next ones are on their way meanwhile:
    those of whole chunks, which need no mask.
    """
    start = point_to(laws.logits, row, place, laws.row_stride, laws.place_stride)
    slots = tl.cast(row * laws.places + place, tl.int64) * measures.chunks
    gate = read_gate(laws, row, place)
    last, whole = tl.minimum(first + span, measures.chunks), laws.vocab // block
    for chunk in tl.range(first, tl.minimum(last, whole), num_stages=STAGES):
        ids = chunk * block + tl.arange(0, block)
        measure(measures, laws, gate, slots + chunk, ids, tl.load(start + ids))
    if last > whole:
        ids = whole * block + tl.arange(0, block)
        x = tl.load(start + ids, mask=ids < laws.vocab, other=-INFINITY)
        measure(measures, laws, gate, slots + whole, ids, x)


@triton.jit
def weigh(laws, rate, law, ids, x):
    """Probabilities of tokens `ids` from their logits behind the gate, `law` of `combine`; a GPU
    makes 0 of those below 2**-126.
    """
    largest, scale, best = law
    probs = tl.exp2((x - largest) * rate) * scale
    if laws.gate.is_greedy is not None:
        probs = tl.where(best < 0, probs, (ids == best).to(tl.float32))
    return probs


@triton.jit
def combine(measures, laws, row, place, rate, block: tl.constexpr, padded_chunks: tl.constexpr):
    """The laws of a row's places `[P]`, and the probabilities of their chunks, `[P, C]` float64.

    A law is a tuple: the largest logit, the scale (1 / sum of weights, NaN where the logits are no
    law, and beyond the last place), and the token of a one-hot law or -1.
    """
    chunk = tl.arange(0, padded_chunks)[None]
    slots = tl.cast(row * laws.places + place, tl.int64)[:, None] * measures.chunks + chunk
    is_chunk = (chunk < measures.chunks) & (place < laws.places)[:, None]
    # Written by other programs of the launch, maybe: .cg reads where their writes meet.
    maxima = tl.load(measures.largest + slots, is_chunk, -INFINITY, cache_modifier=".cg")
    weight = tl.load(measures.weight + slots, is_chunk, 0.0, cache_modifier=".cg")
    largest = tl.max(maxima, axis=1)
    peaks = tl.exp2((maxima - largest[:, None]) * rate)  # NaN where nothing is finite
    total = tl.sum(weight * peaks, axis=1)
    scale = tl.where(total > 0, tl.div_rn(1.0, total), float("nan"))
    is_empty = peaks * scale[:, None] == 0  # no token of the chunk is above 0 in float32
    shares = tl.where(is_empty, 0.0, weight * peaks * scale[:, None]).to(tl.float64)
    best = tl.full(place.shape, -1, tl.int32)
    if laws.gate.is_greedy is not None:
        firsts = tl.load(measures.best + slots, is_chunk, 0, cache_modifier=".cg")
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
def find_past(weights, threshold, length: tl.constexpr):
    """The first index whose cumulative weight exceeds the threshold, never one of weight 0, and the
    weight before it. Rounding may leave none: then the last index of positive weight; length where
    there is none either.
    """
    index = tl.arange(0, length)
    is_positive = weights > 0  # asked for, since a parallel prefix sum is not flat over zeros
    is_past = (tl.cumsum(weights, axis=0) > threshold) & is_positive
    first = tl.min(tl.where(is_past, index, length), axis=0)
    last = tl.max(tl.where(is_positive, index, -1), axis=0)
    last = tl.where(last < 0, length, last)
    found = tl.where(first < length, first, last)
    return found, tl.sum(tl.where(index < found, weights, 0.0), axis=0)
