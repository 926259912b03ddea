"""Device functions that the kernels share: rows of logits seen through their gate, in chunks.

A row of V logits is cut into C chunks, and a program reads a span of them. `measure` reduces a
chunk to its largest logit and the sum of its weights; `combine` reduces the chunks of a row to the
row's largest logit and scale. `weigh` then gives a token's probability from its logit: the same
float32 number wherever it is computed, so two equal laws subtract to exactly 0.

No kernel waits for the host, and every address is computed in 64 bits.

Legend: B rows, N places of a window, V vocabulary, C chunks; a spot is row * N + place.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gate import Floor, Gate

MAX_SPAN, MIN_PROGRAMS = 4, 1024
STAGES = tl.constexpr(3)
LOG2_E = tl.constexpr(1.4426950408889634)
INFINITY = tl.constexpr(float("inf"))


class Laws(NamedTuple):
    """Logits and how they become laws; a kernel takes it as one argument.

    Args:
        logits: `[B, N, V]` of any strides whose last is 1.
        row_stride: of logits.
        place_stride: of logits.
        places: N.
        vocab: V.
        gate: from logits to laws; what is `None` there compiles away.
    """

    logits: Tensor
    row_stride: int
    place_stride: int
    places: int
    vocab: int
    gate: Gate


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


def laws_of(logits: Tensor, gate: Gate) -> Laws:
    """Arguments for kernels that read logits `[B, N, V]` through a gate."""
    logits = with_dense_rows(logits)
    columns = [None if t is None else t.contiguous() for t in gate[:2]]
    floor = gate.floor and Floor(*(t.contiguous() for t in gate.floor))
    _, places, vocab = logits.shape
    return Laws(logits, *logits.stride()[:2], places, vocab, Gate(*columns, floor))


def with_dense_rows(table: Tensor) -> Tensor:
    """The table itself if its rows of V are contiguous, else a copy."""
    return table if table.stride(-1) == 1 else table.contiguous()


def find_span(rows: int, chunks: int) -> int:
    """Chunks per program: several where that leaves enough programs to fill a GPU."""
    return max(1, min(MAX_SPAN, rows * chunks // MIN_PROGRAMS))


def new_measures(logits: Tensor, gate: Gate, block: int) -> Measures:
    """Tables for chunks of `block` tokens of logits `[B, N, V]`, not filled."""
    shape = *logits.shape[:2], triton.cdiv(logits.shape[2], block)
    largest = torch.empty(shape, dtype=torch.float32, device=logits.device)
    best = None
    if gate.is_greedy is not None:
        best = torch.empty(shape, dtype=torch.int32, device=logits.device)
    return Measures(largest, torch.empty_like(largest), best, shape[2])


@triton.jit
def point_to(table, row, place, row_stride, place_stride):
    """Where a row of a table starts."""
    return table + (tl.cast(row, tl.int64) * row_stride + tl.cast(place, tl.int64) * place_stride)


@triton.jit
def read_gate(laws, row, place):
    """What a row's gate says: the rate by which `exp2((logit - largest) * rate)` are its weights, the
    temperature in float32, as the definition casts it, and the floor's logit and id.

    Greedy rows have no floor. For places beyond the last, it is that of the last.
    """
    gate = laws.gate
    temperature = tl.full((), 1.0, tl.float32)
    if gate.temperature is not None:
        temperature = tl.load(gate.temperature + row).to(tl.float32)
    rate = tl.div_rn(tl.full((), LOG2_E, tl.float32), temperature)
    at, tie = tl.full((), -INFINITY, tl.float32), tl.full((), 0, tl.int64)
    if gate.floor is not None:
        spot = row * laws.places + tl.minimum(place, laws.places - 1)
        at, tie = tl.load(gate.floor.logits + spot), tl.load(gate.floor.ids + spot)
        if gate.is_greedy is not None:
            at = tl.where(tl.load(gate.is_greedy + row), -INFINITY, at)
    return rate, temperature, at, tie


@triton.jit
def pass_gate(laws, gate, ids, x):
    """float32 logits of tokens `ids`, not scaled, -inf below the floor; `gate` is of `read_gate`.

    The floor is met by the exactly rounded quotient, which is what the definition compares.
    """
    _, temperature, at, tie = gate
    x = x.to(tl.float32)
    if laws.gate.floor is not None:
        scaled = x
        if laws.gate.temperature is not None:
            scaled = tl.div_rn(x, temperature)
        x = tl.where((scaled < at) | ((scaled == at) & (ids < tie)), -INFINITY, x)
    return x


@triton.jit
def weigh(laws, gate, law, ids, x):
    """Probabilities of tokens `ids` from their logits; below 2**-126 a GPU makes them 0. `law` is of
    `combine`.
    """
    largest, scale, best = law
    probs = tl.exp2((pass_gate(laws, gate, ids, x) - largest) * gate[0]) * scale
    if laws.gate.is_greedy is not None:
        probs = tl.where(best < 0, probs, (ids == best).to(tl.float32))
    return probs


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
        best = tl.argmax((x == largest).to(tl.int32), axis=0)  # the first of equal maxima
        tl.store(measures.best + slot, tl.min(ids, axis=0) + best)


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
def read_logits(laws, row, place, ids):
    """Logits of tokens `ids` as they are stored, -inf for others; for places beyond the last, those
    of the last.
    """
    place = tl.minimum(place, laws.places - 1)
    start = point_to(laws.logits, row, place, laws.row_stride, laws.place_stride)
    return tl.load(start + ids, mask=(ids >= 0) & (ids < laws.vocab), other=-INFINITY)


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
