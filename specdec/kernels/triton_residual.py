"""Device functions that take a draft law off a target law.

Legend: B rows, K draft tokens (width), V vocabulary, C chunks of a row, P >= K + 1 a power of two.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import is_missing, peek, read_pairs, write
from specdec.kernels.triton_laws import pass_gate, point_to, read_gate, read_logits
from specdec.kernels.triton_rows import weigh

PIECE = tl.constexpr(1024)  # tokens of a chunk that are read at a time
PARTS = tl.constexpr(128)  # as many as 4 warps have threads


class Residuals(NamedTuple):
    """What is left of the target where the draft is taken off; a kernel takes it as one argument.

    There are R places of a row: K block by block; and token by token one, which is drawn from.

    Args:
        masses: `[B, R, C, 2]` float32 of each chunk: of the residual, and of the draft law.
        orders: `[B, R, 3]` float32, how to compute each: the law's largest logit and scale, and
            the factor P_i; `None` token by token.
        hot: `[B, R]` int32, the token of a one-hot law, or -1; `None` as orders.
        count: R.
        chunks: C.
    """

    masses: Tensor
    orders: Tensor | None
    hot: Tensor | None
    count: int
    chunks: int


@triton.jit
def take_off(laws, gate, law, factor, ids, x, draft):
    """`max(0, factor * target - draft)` of tokens `ids`; NaN stays, so that it is refused."""
    x = pass_gate(laws, gate, ids, x)
    left = weigh(laws, gate[0], law, factor, ids, x) - draft.to(tl.float32)
    return tl.maximum(left, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def read_draft(chain, laws, row, place, ids):
    """Draft probabilities of tokens `ids` as they are stored, 0 beyond the vocabulary."""
    start = point_to(chain.probs, row, place, chain.row_stride, chain.place_stride)
    return tl.load(start + ids, mask=ids < laws.vocab, other=0.0)


@triton.jit
def order_residuals(residuals, row, place, target, factor):
    """Says how to compute the residuals of places `[P]`."""
    largest, scale, best = target
    slot, is_slot = tl.cast(row, tl.int64) * residuals.count + place, place < residuals.count
    write(residuals.hot + slot, best, is_slot)
    write(residuals.orders + 3 * slot, largest, is_slot)
    write(residuals.orders + 3 * slot + 1, scale, is_slot)
    write(residuals.orders + 3 * slot + 2, factor.to(tl.float32), is_slot)


@triton.jit
def _peek_at_order(residuals, slot):
    order = residuals.orders + 3 * slot
    return (peek(order), peek(order + 1), peek(residuals.hot + slot)), peek(order + 2)


@triton.jit
def _is_incomplete(law, factor):
    missing = is_missing(law[0]) | is_missing(law[1]) | is_missing(law[2]) | is_missing(factor)
    return missing > 0


@triton.jit
def read_order(residuals, row, index):
    """The law and the factor of the residual in slot `index`, when they are written."""
    slot = tl.cast(row, tl.int64) * residuals.count + index
    law, factor = _peek_at_order(residuals, slot)
    while _is_incomplete(law, factor):
        law, factor = _peek_at_order(residuals, slot)
    return law, factor


@triton.jit
def _add(left, mass, laws, gate, law, factor, ids, x, draft):
    """Adds a piece of a residual and of its draft law to what each thread has of them."""
    shape: tl.constexpr = (left.shape[0], ids.shape[0] // left.shape[0])
    rest = take_off(laws, gate, law, factor, ids, x, draft)
    left += tl.sum(tl.reshape(rest, shape), axis=1)
    mass += tl.sum(tl.reshape(draft.to(tl.float32), shape), axis=1)
    return left, mass


@triton.jit
def subtract_span(
    residuals, chain, laws, row, index, place, order, first, span, block: tl.constexpr
):
    """Tells the masses of `span` chunks of the residual in slot `index`, from the first on; `order`
    is the law at the place, and the factor.
    """
    law, factor = order
    gate = read_gate(laws, row, place)
    slot = tl.cast(row, tl.int64) * residuals.count + index
    masses = residuals.masses + 2 * slot * residuals.chunks
    start = point_to(laws.logits, row, place, laws.row_stride, laws.place_stride)
    of_draft = point_to(chain.probs, row, place, chain.row_stride, chain.place_stride)
    piece: tl.constexpr = block if block < PIECE else PIECE
    parts: tl.constexpr = PARTS if piece > PARTS else piece
    for chunk in range(first, tl.minimum(first + span, residuals.chunks)):
        left, mass = tl.full((parts,), 0.0, tl.float32), tl.full((parts,), 0.0, tl.float32)
        if (chunk + 1) * block <= laws.vocab:  # without masks
            for i in tl.static_range(block // piece):
                ids = chunk * block + i * piece + tl.arange(0, piece)
                x = tl.load(start + ids, eviction_policy="evict_first")  # neither is read again
                draft = tl.load(of_draft + ids, eviction_policy="evict_first")
                left, mass = _add(left, mass, laws, gate, law, factor, ids, x, draft)
        else:
            for i in tl.static_range(block // piece):
                ids = chunk * block + i * piece + tl.arange(0, piece)
                x = read_logits(laws, row, place, ids)
                draft = read_draft(chain, laws, row, place, ids)
                left, mass = _add(left, mass, laws, gate, law, factor, ids, x, draft)
        write(masses + 2 * chunk + tl.arange(0, 2), tl.sum(tl.join(left, mass), axis=0))


@triton.jit
def read_masses(residuals, row, index, is_read, padded_chunks: tl.constexpr):
    """Masses of the residuals and of the draft laws in slots `[P]`, `[P, C]` float64 each, 0 where
    nothing is read.
    """
    chunk = tl.arange(0, padded_chunks)[None]
    slots = (tl.cast(row, tl.int64) * residuals.count + index)[:, None] * residuals.chunks + chunk
    is_chunk = (chunk < residuals.chunks) & is_read[:, None]
    into = residuals.masses + 2 * slots
    left, draft = read_pairs(into, into + 1, is_chunk)
    return left.to(tl.float64), draft.to(tl.float64)
