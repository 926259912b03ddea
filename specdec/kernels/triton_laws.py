"""Device functions that read logits and put them through their gate.

No kernel waits for the host, and every address is computed in 64 bits.

Legend: B rows, N places of a window, V vocabulary; a spot is row * N + place.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gate import Floor, Gate
from specdec.kernels.triton_launch import SHARED

LOG2_E = tl.constexpr(1.4426950408889634)
INFINITY = tl.constexpr(float("inf"))
MAX_ROWS = 2**16 - 1


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


def laws_of(logits: Tensor, gate: Gate) -> Laws:
    """Arguments for kernels that read logits `[B, N, V]` through a gate.

    Raises:
        ValueError: more rows than a launch can count.
    """
    if len(logits) > MAX_ROWS:
        raise ValueError(
            f"kernels take at most {MAX_ROWS} rows at a time, got {len(logits)}; split the batch"
        )
    logits = with_dense_rows(logits)
    columns = [None if t is None else t.contiguous() for t in gate[:2]]
    floor = gate.floor and Floor(*(t.contiguous() for t in gate.floor))
    _, places, vocab = logits.shape
    return Laws(logits, *logits.stride()[:2], places, vocab, Gate(*columns, floor))


def with_dense_rows(table: Tensor) -> Tensor:
    """The table itself if its rows of V are contiguous, else a copy."""
    return table if table.stride(-1) == 1 else table.contiguous()


@triton.jit
def point_to(table, row, place, row_stride, place_stride):
    """Where a row of a table starts."""
    return table + (tl.cast(row, tl.int64) * row_stride + tl.cast(place, tl.int64) * place_stride)


@triton.jit
def read_logits(laws, row, place, ids, is_early: tl.constexpr = False):
    """Logits of tokens `ids` as they are stored, -inf for others; for places beyond the last, those
    of the last. They are read as may be done before `wait_for_last` where the call `is_early`.
    """
    cache: tl.constexpr = SHARED if is_early else ""
    place = tl.minimum(place, laws.places - 1)
    start = point_to(laws.logits, row, place, laws.row_stride, laws.place_stride)
    is_token = (ids >= 0) & (ids < laws.vocab)
    return tl.load(start + ids, mask=is_token, other=-INFINITY, cache_modifier=cache)


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
    """The float of a key of a type, in float32."""
    size = tl.abs(key)
    if dtype == tl.float32:
        value = size.to(tl.float32, bitcast=True)
    else:
        value = size.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return tl.where(key < 0, -value, value)


@triton.jit
def find_ties(at, temperature):
    """The least and the largest float32 whose quotient by the temperature is `at`, rounded exactly
    as in the definition. So a floor meets logits as they are, and no table is divided.

    They are found among the 16 floats around the product, of which they are a few units off.
    """
    below = to_key(at * temperature) - 8  # the largest key whose quotient is less
    last = below  # the largest key whose quotient is not more
    for bit in tl.static_range(4):
        step = 8 >> bit
        quotient = tl.div_rn(from_key(below + step, tl.float32), temperature)
        below = tl.where(quotient < at, below + step, below)
        quotient = tl.div_rn(from_key(last + step, tl.float32), temperature)
        last = tl.where(quotient <= at, last + step, last)
    least = tl.where(at == -INFINITY, at, from_key(below + 1, tl.float32))
    return least, from_key(last, tl.float32)


@triton.jit
def read_gate(laws, row, place):
    """What a row's gate says: the rate, by which weights are `exp2((logit - largest) * rate)`; the
    least and the largest logit at the floor; and the id below which those at the floor go.

    Greedy rows have no floor. For places beyond the last, it is that of the last.
    """
    gate = laws.gate
    temperature = tl.full((), 1.0, tl.float32)
    if gate.temperature is not None:
        temperature = tl.load(gate.temperature + row, cache_modifier=SHARED).to(tl.float32)
    rate = tl.div_rn(tl.full((), LOG2_E, tl.float32), temperature)
    least, largest = tl.full((), -INFINITY, tl.float32), tl.full((), -INFINITY, tl.float32)
    tie = tl.full((), 0, tl.int32)
    if gate.floor is not None:
        spot = row * laws.places + tl.minimum(place, laws.places - 1)
        at = tl.load(gate.floor.logits + spot, cache_modifier=SHARED)
        tie = tl.load(gate.floor.ids + spot, cache_modifier=SHARED)
        tie = tie.to(tl.int32)  # as wide as the ids that it meets
        if gate.is_greedy is not None:
            is_greedy = tl.load(gate.is_greedy + row, cache_modifier=SHARED)
            at, tie = tl.where(is_greedy, -INFINITY, at), tl.where(is_greedy, 0, tie)
        least, largest = at, at
        if gate.temperature is not None:
            least, largest = find_ties(at, temperature)
    return rate, least, largest, tie


@triton.jit
def pass_gate(laws, gate, ids, x):
    """float32 logits of tokens `ids`, not scaled, -inf below the floor; `gate` of `read_gate`."""
    _, least, largest, tie = gate
    x = x.to(tl.float32)
    if laws.gate.floor is not None:
        x = tl.where((x < least) | ((x <= largest) & (ids < tie)), -INFINITY, x)
    return x
