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


class Residuals(NamedTuple):
    """What is left of the target where the draft is taken off; a kernel takes it as one argument.

    There are R places of a row: K block by block; and token by token one, which is drawn from.

    Args:
        masses: `[B, R, 2, parts]` float32 of the residual, and of the draft law.
        orders: `[B, R, 3]` float32, how to compute each: the law's largest logit and scale, and
            the factor P_i; `None` token by token.
        hot: `[B, R]` int32, the token of a one-hot law, or -1; `None` as orders.
        count: R.
        parts: of a row; a chunk has one for each warp of a program.
    """

    masses: Tensor
    orders: Tensor | None
    hot: Tensor | None
    count: int
    parts: int


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
def _subtract(
    chain,
    laws,
    row,
    place,
    gate,
    order,
    chunk,
    stride: tl.constexpr,
    span: tl.constexpr,
    is_whole: tl.constexpr,
    block: tl.constexpr,
    warps: tl.constexpr,
):
    """What each thread has of its warp's part of every `stride`-th chunk, `span` of them: `[warps,
    32, 2, span]`, of what is left and of the draft law; the last axis is several, of two each.
    Chunks that are all whole need no masks.
    """
    if span == 1:
        law, factor = order
        part: tl.constexpr = block // warps
        # The draft's numbers are the widest: threads side by side read theirs side by side.
        side: tl.constexpr = 128 // chain.probs.dtype.element_ty.primitive_bitwidth
        piece: tl.constexpr = 32 * side if part > 32 * side else part
        lanes: tl.constexpr = 32 if piece > 32 else piece
        shape: tl.constexpr = (warps, lanes, piece // lanes)
        left = tl.full((warps, lanes), 0.0, tl.float32)
        mass = tl.full((warps, lanes), 0.0, tl.float32)
        for i in tl.static_range(part // piece):
            ids = chunk * block + i * piece + tl.arange(0, piece)
            ids = ids[None] + part * tl.arange(0, warps)[:, None]
            if is_whole:
                start = point_to(laws.logits, row, place, laws.row_stride, laws.place_stride)
                x = tl.load(start + ids, eviction_policy="evict_first")  # one part is read again
                start = point_to(chain.probs, row, place, chain.row_stride, chain.place_stride)
                draft = tl.load(start + ids, eviction_policy="evict_first").to(tl.float32)
            else:
                x = read_logits(laws, row, place, ids)
                draft = read_draft(chain, laws, row, place, ids).to(tl.float32)
            rest = take_off(laws, gate, law, factor, ids, x, draft)
            left += tl.sum(tl.reshape(rest, shape), axis=2)
            mass += tl.sum(tl.reshape(draft, shape), axis=2)
        both = tl.join(left, mass)
    else:
        half: tl.constexpr = span // 2
        twice: tl.constexpr = 2 * stride
        even = _subtract(
            chain, laws, row, place, gate, order, chunk, twice, half, is_whole, block, warps
        )
        chunk += stride
        odd = _subtract(
            chain, laws, row, place, gate, order, chunk, twice, half, is_whole, block, warps
        )
        both = tl.join(even, odd)
    return both


@triton.jit
def subtract_span(
    residuals,
    chain,
    laws,
    row,
    index,
    place,
    order,
    first,
    span: tl.constexpr,
    block: tl.constexpr,
    warps: tl.constexpr,
):
    """Tells the masses of the parts of `span` chunks, a power of two, of the residual in slot
    `index`, from the first on; `order` is the law at the place, and the factor.

    A warp has parts of its own, so that warps do not meet, and threads at the end only.
    """
    gate = read_gate(laws, row, place)
    if (first + span) * block <= laws.vocab:
        both = _subtract(chain, laws, row, place, gate, order, first, 1, span, True, block, warps)
    else:
        both = _subtract(chain, laws, row, place, gate, order, first, 1, span, False, block, warps)
    both = tl.reshape(tl.sum(both, axis=1), (warps, 2, span))
    kind, chunk = tl.arange(0, 2)[None, :, None], first + tl.arange(0, span)[None, None, :]
    part = chunk * warps + tl.arange(0, warps)[:, None, None]
    slot = tl.cast(row, tl.int64) * residuals.count + index
    into = residuals.masses + (2 * slot + kind) * residuals.parts + part
    write(into, both, mask=part < residuals.parts)


@triton.jit
def read_masses(
    residuals, row, index, is_read, padded_parts: tl.constexpr, is_awaited: tl.constexpr
):
    """Masses of the parts of the residual and of the draft law in slot `index`, `[parts]` float32
    each, 0 if nothing is read; and of slots `[P, 1]`, `[P, parts]`. Those that others are writing
    must be awaited.
    """
    part = tl.arange(0, padded_parts)
    slot = tl.cast(row, tl.int64) * residuals.count + index
    is_part = part < tl.where(is_read, residuals.parts, 0)
    into = residuals.masses + (2 * slot * residuals.parts + part)
    others = into + residuals.parts
    if is_awaited:
        left, draft = read_pairs(into, others, is_part)
    else:
        left, draft = tl.load(into, is_part, 0.0), tl.load(others, is_part, 0.0)
    return left, draft
