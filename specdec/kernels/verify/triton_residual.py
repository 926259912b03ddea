"""The launches that sum what is left of the target without the draft, and that draw the extra token
from it.

The residual at window index i is `max(0, P_i * target - draft)`, with P_i = 1 by the token rule. A
point mass is a one-hot draft, so it needs no case of its own.

Legend: B rows, K draft tokens (width), V vocabulary, C chunks of a row, S residuals of a row: K by
the block rule, one by the token rule.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_common import (
    find_past,
    find_past_in_chunk,
    merge_row,
    probs_of,
    read_logits,
    read_params,
    row_start,
)
from specdec.kernels.verify.reference import SUM_TOLERANCE
from specdec.kernels.verify.triton_accept import read_num_valid, read_target
from specdec.types import PAD_TOKEN, Fault

PAD = tl.constexpr(PAD_TOKEN)
TOLERANCE = tl.constexpr(SUM_TOLERANCE)
TARGET_LOGITS = tl.constexpr(int(Fault.TARGET_LOGITS))
DRAFT_PROBS = tl.constexpr(int(Fault.DRAFT_PROBS))


class Residuals(NamedTuple):
    """Sums over the chunks of residuals, `[B, S, C]` float32 each.

    Args:
        residual: of `max(0, P_i * target - draft)`.
        draft: of the draft probabilities, NaN where one is negative.
        num_slots: S.
    """

    residual: Tensor
    draft: Tensor
    num_slots: int


@triton.jit
def _residual_of(rows, inputs, row, index, width, target, is_short, ids):
    """Weights of tokens `ids` that the extra token is drawn from, and their draft probabilities.
    Where nothing was rejected (`is_short` is false) the draft counts as 0 and P_i as 1.

    `target` is of `read_target`.
    """
    distribution, path = target
    params = read_params(rows, row, index)
    p = probs_of(rows, params, distribution, ids, read_logits(rows, row, index, ids))
    if inputs.probs is None:
        point = tl.load(inputs.tokens + row * width + index, is_short, -1)
        draft = (ids == point).to(tl.float32)
    else:
        is_read = ids < tl.where(is_short, rows.vocab, 0)
        draft = tl.load(row_start(inputs.probs, row, index) + ids, is_read, 0.0).to(tl.float32)
    residual = tl.where(is_short, path.to(tl.float32), 1.0) * p - draft
    return tl.maximum(residual, 0.0, propagate_nan=tl.PropagateNan.ALL), draft


@triton.jit
def residual_kernel(
    rows,
    inputs,
    target,
    residuals,
    outcome,
    by_block: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """One program per chunk of a residual. By the token rule only the rejected token's is read."""
    row, slot, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    index = slot.to(tl.int64)
    if not by_block:
        index = tl.load(outcome.num_accepted + row)
    is_short = index < read_num_valid(inputs, row, width)
    if is_short:
        ids = chunk * block + tl.arange(0, block)
        residual, draft = _residual_of(
            rows, inputs, row, index, width, read_target(target, row, index, width), is_short, ids
        )
        into = (tl.cast(row, tl.int64) * residuals.num_slots + slot) * tl.num_programs(2) + chunk
        tl.store(residuals.residual + into, tl.sum(residual, axis=0))
        draft = tl.where(draft < 0, float("nan"), draft)
        tl.store(residuals.draft + into, tl.sum(draft, axis=0))


@triton.jit
def _longest_prefix(inputs, target, row, index, num_valid, mass, width: tl.constexpr):
    """How many tokens the block rule accepts, given the sums of the residuals `[P]`."""
    is_prefix = (index > 0) & (index <= num_valid)
    u = tl.load(row_start(inputs.accept, row, index - 1), is_prefix, 0.0)
    path = tl.load(target.path + row * (width + 1) + index, is_prefix, 0.0)
    is_accepted = tl.where(index == num_valid, u < path, u * (mass + 1 - path) < mass)
    return tl.max(tl.where(is_prefix & is_accepted, index, 0), axis=0)


@triton.jit
def _draw(rows, inputs, partials, target, row, count, width, sums, is_short, block, padded_chunks):
    """The extra token of a row: from the residual after the accepted prefix, whose sums over chunks
    are `[C]` float64, unless all are 0 or nothing was rejected; then from the target.
    """
    is_short &= tl.sum(sums, axis=0) > 0
    rate = read_params(rows, row, count)[0]
    merged, shares = merge_row(rows, partials, row, count, rate, block, padded_chunks)
    stored, path = read_target(target, row, count, width)
    # Chunk sums and token weights must come from the same numbers, or a weight of 0 may be drawn.
    distribution = (
        tl.where(is_short, stored[0], merged[0]),
        tl.where(is_short, stored[1], merged[1]),
        tl.where(is_short, stored[2], merged[2]),
    )
    sums = tl.where(is_short, sums, shares)
    threshold = tl.load(row_start(inputs.resample, row, 0)) * tl.sum(sums, axis=0)
    chunk, before = find_past(sums, threshold, padded_chunks)
    first = tl.minimum(chunk, partials.num_chunks - 1) * block  # past the end where all is NaN
    ids = first + tl.arange(0, block)
    weights, _ = _residual_of(
        rows, inputs, row, count, width, (distribution, path), is_short, ids
    )
    offset = find_past_in_chunk(weights, threshold - before, block)
    return tl.minimum(first + offset, rows.vocab - 1)


@triton.jit
def finalize_kernel(
    rows,
    inputs,
    partials,
    target,
    residuals,
    outcome,
    by_block: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    padded_indices: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    """One program per row: counts the accepted tokens by the block rule, draws the extra token, and
    completes `outcome`.
    """
    row, index = tl.program_id(0), tl.arange(0, padded_indices)
    num_valid, chunk = read_num_valid(inputs, row, width), tl.arange(0, padded_chunks)
    count = tl.full((), 0, tl.int64)
    if not by_block:
        count = tl.load(outcome.num_accepted + row)
    slot = index if by_block else tl.arange(0, 1)
    is_read = (slot if by_block else count + slot) < num_valid
    at = (tl.cast(row, tl.int64) * residuals.num_slots + slot) * partials.num_chunks
    at, is_chunk = at[:, None] + chunk[None], is_read[:, None] & (chunk < partials.num_chunks)[None]
    sums = tl.load(residuals.residual + at, is_chunk, 0.0).to(tl.float64)  # [S, C]
    draft_sums = tl.sum(tl.load(residuals.draft + at, is_chunk, 0.0), axis=1)
    is_off = is_read & ((tl.abs(draft_sums - 1) <= TOLERANCE) == 0)  # NaN is off
    fault = tl.load(outcome.faults + row) | tl.max(is_off.to(tl.int64), axis=0) * DRAFT_PROBS
    if by_block:
        mass = tl.sum(sums, axis=1)
        count = _longest_prefix(inputs, target, row, index, num_valid, mass, width).to(tl.int64)
        sums = tl.where((index == count)[:, None], sums, 0.0)
    sums, is_short = tl.sum(sums, axis=0), count < num_valid
    extra = _draw(
        rows, inputs, partials, target, row, count, width, sums, is_short, block, padded_chunks
    )
    scale = tl.load(target.scale + row * (width + 1) + index, index <= count, 0.0)
    fault |= tl.max((scale != scale).to(tl.int64), axis=0) * TARGET_LOGITS
    token = tl.load(inputs.tokens + row * width + index, index < count, PAD)
    token = tl.where(index == count, extra, token)
    tl.store(outcome.tokens + row * (width + 1) + index, token, index <= width)
    tl.store(outcome.num_accepted + row, count)
    tl.store(outcome.faults + row, fault)
