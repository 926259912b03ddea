"""Device functions that take a draft law off a target law.

Legend: B rows, K draft tokens (width), V vocabulary, C chunks of a row, P >= K + 1 a power of two.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_laws import pass_gate, point_to, read_gate, read_logits
from specdec.kernels.triton_rows import weigh


class Residuals(NamedTuple):
    """What is left of the target where the draft is taken off; a kernel takes it as one argument.

    There are R places of a row: K block by block; and token by token one, which is drawn from.

    Args:
        masses: `[B, R, C, 2]` float64 of each chunk: of the residual, and of the draft law.
        orders: `[B, R, 3]` float32, how to compute each: the law's largest logit and scale, and
            the factor P_i.
        places: `[B, R, 2]` int32: the place in the window, or -1 for none; and the token of a
            one-hot law, or -1.
        count: R.
        chunks: C.
    """

    masses: Tensor
    orders: Tensor
    places: Tensor
    count: int
    chunks: int


@triton.jit
def take_off(laws, gate, law, factor, ids, x, draft):
    """`max(0, factor * target - draft)` of tokens `ids`; NaN stays, so that it is refused."""
    x = pass_gate(laws, gate, ids, x)
    left = weigh(laws, gate[0], law, ids, x) * factor - draft.to(tl.float32)
    return tl.maximum(left, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def read_draft(chain, laws, row, place, ids):
    """Draft probabilities of tokens `ids` as they are stored, 0 beyond the vocabulary."""
    start = point_to(chain.probs, row, place, chain.row_stride, chain.place_stride)
    return tl.load(start + ids, mask=ids < laws.vocab, other=0.0)


@triton.jit
def _store_masses(into, left, draft, block: tl.constexpr):
    """Four neighbours are added in float32, and all others in float64."""
    left = tl.sum(tl.reshape(left, (block // 4, 4)), axis=1).to(tl.float64)
    draft = tl.sum(tl.reshape(draft.to(tl.float32), (block // 4, 4)), axis=1).to(tl.float64)
    tl.store(into + tl.arange(0, 2), tl.sum(tl.join(left, draft), axis=0))


@triton.jit
def order_residuals(residuals, row, place, index, is_wanted, target, factor):
    """Says how to compute the residuals of places `[P]`, in slots `index`, -1 for none."""
    largest, scale, best = target
    slot = tl.cast(row, tl.int64) * residuals.count + index
    is_slot = (index >= 0) & (index < residuals.count)
    tl.store(residuals.orders + 3 * slot, largest, mask=is_slot)
    tl.store(residuals.orders + 3 * slot + 1, scale, mask=is_slot)
    tl.store(residuals.orders + 3 * slot + 2, factor.to(tl.float32), mask=is_slot)
    tl.store(residuals.places + 2 * slot, tl.where(is_wanted, place, -1), mask=is_slot)
    tl.store(residuals.places + 2 * slot + 1, best, mask=is_slot)


@triton.jit
def subtract_span(residuals, chain, laws, row, index, first, last, block: tl.constexpr):
    """Stores the masses of the chunks first..last - 1 of a residual that was ordered."""
    slot = tl.cast(row, tl.int64) * residuals.count + index
    # Written by another program of the launch: .cg reads where its writes are met.
    place = tl.load(residuals.places + 2 * slot, cache_modifier=".cg")
    best = tl.load(residuals.places + 2 * slot + 1, cache_modifier=".cg")
    largest = tl.load(residuals.orders + 3 * slot, cache_modifier=".cg")
    scale = tl.load(residuals.orders + 3 * slot + 1, cache_modifier=".cg")
    factor = tl.load(residuals.orders + 3 * slot + 2, cache_modifier=".cg")
    if place >= 0:
        gate, law = read_gate(laws, row, place), (largest, scale, best)
        masses = residuals.masses + 2 * slot * residuals.chunks
        start = point_to(laws.logits, row, place, laws.row_stride, laws.place_stride)
        of_draft = point_to(chain.probs, row, place, chain.row_stride, chain.place_stride)
        whole = laws.vocab // block
        for chunk in range(first, tl.minimum(last, whole)):  # without masks
            ids = chunk * block + tl.arange(0, block)
            x = tl.load(start + ids, eviction_policy="evict_first")  # neither is read again
            draft = tl.load(of_draft + ids, eviction_policy="evict_first")
            left = take_off(laws, gate, law, factor, ids, x, draft)
            _store_masses(masses + 2 * chunk, left, draft, block)
        if last > whole:
            ids = whole * block + tl.arange(0, block)
            draft = read_draft(chain, laws, row, place, ids)
            x = read_logits(laws, row, place, ids)
            left = take_off(laws, gate, law, factor, ids, x, draft)
            _store_masses(masses + 2 * whole, left, draft, block)


@triton.jit
def read_masses(residuals, row, index, is_read, padded_chunks: tl.constexpr):
    """Masses of the residuals and of the draft laws in slots `[P]`, `[P, C]` each, 0 where nothing
    is read.
    """
    chunk = tl.arange(0, padded_chunks)[None]
    slots = (tl.cast(row, tl.int64) * residuals.count + index)[:, None] * residuals.chunks + chunk
    is_chunk = (chunk < residuals.chunks) & is_read[:, None]
    into = residuals.masses + 2 * slots
    mass = tl.load(into, mask=is_chunk, other=0.0, cache_modifier=".cg")
    return mass, tl.load(into + 1, mask=is_chunk, other=0.0, cache_modifier=".cg")
