"""The launches that sum the residual, and that draw the extra token from it.

The residual at window index i is `max(0, P_i * target - draft)`, with P_i = 1 by the token rule. A
point mass is a one-hot draft, so it needs no case of its own.

Legend: as `triton_accept`.
"""

import triton
import triton.language as tl

from specdec.kernels.triton_common import (
    chunk_probs,
    find_past,
    find_past_in_chunk,
    read_probs,
    row_start,
)
from specdec.kernels.verify.reference import SUM_TOLERANCE
from specdec.kernels.verify.triton_accept import read_num_valid
from specdec.types import PAD_TOKEN, Fault

PAD = tl.constexpr(PAD_TOKEN)
TOLERANCE = tl.constexpr(SUM_TOLERANCE)
TARGET_LOGITS = tl.constexpr(int(Fault.TARGET_LOGITS))
DRAFT_PROBS = tl.constexpr(int(Fault.DRAFT_PROBS))


@triton.jit
def _read_target(t, row, index, width: tl.constexpr):
    """The distribution at a row's window index, for `read_probs`."""
    entry = row * (width + 1) + index
    row_max, row_sum = tl.load(t.target.row_max + entry), tl.load(t.target.row_sum + entry)
    return row_max, row_sum, tl.load(t.target.one_hot + entry)


@triton.jit
def _read_residual(t, row, index, distribution, is_short, ids, width: tl.constexpr):
    """Weights of tokens `ids` that the extra token is drawn from, and their draft probabilities.
    Where nothing was rejected (`is_short` is false) the draft counts as 0 and P_i as 1.
    """
    if t.inputs.probs is None:
        point = tl.load(t.inputs.tokens + row * width + index, is_short, -1)
        draft = (ids == point).to(tl.float32)
    else:
        is_read = ids < tl.where(is_short, t.rows.vocab, 0)
        draft = tl.load(row_start(t.inputs.probs, row, index) + ids, is_read, 0.0).to(tl.float32)
    factor = tl.load(t.target.path + row * (width + 1) + index).to(tl.float32)
    target = read_probs(t.rows, row, index, distribution, ids)
    residual = tl.where(is_short, factor, 1.0) * target - draft
    return tl.maximum(residual, 0.0, propagate_nan=tl.PropagateNan.ALL), draft


@triton.jit
def residual_kernel(t, by_block: tl.constexpr, width: tl.constexpr, block: tl.constexpr):
    """One program per chunk of a residual; by the token rule only that of the rejected token."""
    row, residual_id = tl.program_id(0), tl.program_id(1)
    chunk = tl.num_programs(2) - 1 - tl.program_id(2)  # those read last may still be in the cache
    index = residual_id.to(tl.int64)
    if not by_block:
        index = tl.load(t.outcome.num_accepted + row)
    is_short = index < read_num_valid(t.inputs, row, width)
    if is_short:
        ids, distribution = chunk * block + tl.arange(0, block), _read_target(t, row, index, width)
        residual, draft = _read_residual(t, row, index, distribution, is_short, ids, width)
        draft = tl.where(draft < 0, float("nan"), draft)
        into = tl.cast(row, tl.int64) * t.residuals.num_residuals + residual_id
        into = into * t.partials.num_chunks + chunk
        tl.store(t.residuals.residual + into, tl.sum(residual, axis=0))
        tl.store(t.residuals.draft + into, tl.sum(draft, axis=0))


@triton.jit
def _longest_prefix(t, row, index, num_valid, mass, width: tl.constexpr):
    """How many tokens the block rule accepts, given the sums of the residuals `[P]`."""
    is_prefix = (index > 0) & (index <= num_valid)
    u = tl.load(row_start(t.inputs.accept, row, index - 1), is_prefix, 0.0)
    path = tl.load(t.target.path + row * (width + 1) + index, is_prefix, 0.0)
    is_accepted = tl.where(index == num_valid, u < path, u * (mass + 1 - path) < mass)
    return tl.max(tl.where(is_prefix & is_accepted, index, 0), axis=0).to(tl.int64)


@triton.jit
def _draw_extra(
    t,
    row,
    count,
    sums,
    is_short,
    width: tl.constexpr,
    block: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    """The extra token of a row: from the residual after the accepted prefix, whose sums over chunks
    are `[C]` float64, unless all are 0 or nothing was rejected; then from the target.
    """
    is_short &= tl.sum(sums, axis=0) > 0
    distribution = _read_target(t, row, count, width)
    chunks = chunk_probs(t.rows, t.partials, row, count, distribution, block, padded_chunks)
    sums = tl.where(is_short, sums, chunks)
    threshold = tl.load(row_start(t.inputs.resample, row, 0)) * tl.sum(sums, axis=0)
    chunk, before = find_past(sums, threshold, padded_chunks)
    first = tl.minimum(chunk, t.partials.num_chunks - 1) * block  # past the end where all is NaN
    ids = first + tl.arange(0, block)
    weights, _ = _read_residual(t, row, count, distribution, is_short, ids, width)
    token = first + find_past_in_chunk(weights, threshold - before, block)
    return tl.minimum(token, t.rows.vocab - 1)


@triton.jit
def finalize_kernel(
    t,
    by_block: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    padded_indices: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    """One program per row: counts the accepted tokens by the block rule, draws the extra token, and
    completes `t.outcome`.
    """
    row, index = tl.program_id(0), tl.arange(0, padded_indices)
    num_valid, chunk = read_num_valid(t.inputs, row, width), tl.arange(0, padded_chunks)
    count = tl.full((), 0, tl.int64)
    if not by_block:
        count = tl.load(t.outcome.num_accepted + row)
    residual_id = index if by_block else tl.arange(0, 1)
    is_read = (residual_id if by_block else count + residual_id) < num_valid
    at = tl.cast(row, tl.int64) * t.residuals.num_residuals + residual_id
    at = at[:, None] * t.partials.num_chunks + chunk[None]
    is_chunk = is_read[:, None] & (chunk < t.partials.num_chunks)[None]
    sums = tl.load(t.residuals.residual + at, is_chunk, 0.0).to(tl.float64)  # [S, C]
    draft_sums = tl.sum(tl.load(t.residuals.draft + at, is_chunk, 0.0), axis=1)
    is_off = is_read & ((tl.abs(draft_sums - 1) <= TOLERANCE) == 0)  # NaN is off
    fault = tl.load(t.outcome.faults + row) | tl.max(is_off.to(tl.int64), axis=0) * DRAFT_PROBS
    if by_block:
        count = _longest_prefix(t, row, index, num_valid, tl.sum(sums, axis=1), width)
        sums = tl.where((index == count)[:, None], sums, 0.0)
    sums, is_short = tl.sum(sums, axis=0), count < num_valid
    extra = _draw_extra(t, row, count, sums, is_short, width, block, padded_chunks)
    row_sum = tl.load(t.target.row_sum + row * (width + 1) + index, index <= count, 0.0)
    fault |= tl.max((row_sum != row_sum).to(tl.int64), axis=0) * TARGET_LOGITS
    token = tl.load(t.inputs.tokens + row * width + index, index < count, PAD)
    token = tl.where(index == count, extra, token)
    tl.store(t.outcome.tokens + row * (width + 1) + index, token, index <= width)
    tl.store(t.outcome.num_accepted + row, count)
    tl.store(t.outcome.faults + row, fault)
