"""`verify` on a GPU, in four launches: softmax partials of the target's rows; accept; residual
sums; and finalize, which draws the extra token. The letters are those of `verify.reference`.

The residual at window index i is `max(0, P_i * target - draft)`, with P_i = 1 by the token rule. A
point mass is a one-hot draft, so it needs no case of its own.

Legend: B rows, K draft tokens (width), N = K + 1 window indices, V vocabulary, C chunks of a row, P
window indices padded to a power of two, S residuals of a row: K by the block rule, one by the token
rule.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_common import (
    NO_FUSION,
    Partials,
    Rows,
    Table,
    chunk_probs,
    find_past,
    find_past_in_chunk,
    merge_partials,
    read_probs,
    row_start,
    rows_of,
    softmax_partials,
    table_of,
)
from specdec.kernels.types import FilterParams, VerifyUniforms
from specdec.types import PAD_TOKEN, Draft, Verdict

BLOCK, NUM_WARPS = 4096, 4
PAD = tl.constexpr(PAD_TOKEN)


class Inputs(NamedTuple):
    """A draft and the uniforms."""

    tokens: Tensor  # [B, K] int64, contiguous
    probs: Table | None  # [B, K, V]; None for point masses
    num_valid: Tensor | None  # [B] int64, or None for K
    accept: Table  # [B, K] float64
    resample: Table  # [B, 1] float64


class TargetTables(NamedTuple):
    """The target's distributions, as all launches after `_accept_kernel` compute them: the first
    three are the tuple for `read_probs`.
    """

    row_max: Tensor  # [B, N] float32, the largest logit
    row_sum: Tensor  # [B, N] float32, NaN where the logits give no distribution
    one_hot: Tensor  # [B, N] int32
    path: Tensor  # [B, N] float64, P_0..P_K of the block rule; 1 by the token rule


class Residuals(NamedTuple):
    """Sums over the chunks of residuals."""

    sums: Tensor  # [B, S, C] float32, of max(0, P_i * target - draft)
    num_residuals: int  # S


class OutputTables(NamedTuple):
    """What is returned, int64."""

    tokens: Tensor  # [B, K + 1]
    num_accepted: Tensor  # [B]


class VerifyTables(NamedTuple):
    """All tables of a verdict, as one kernel argument, in the order in which they are filled."""

    rows: Rows
    inputs: Inputs
    partials: Partials
    target: TargetTables
    residuals: Residuals
    outcome: OutputTables


def verify(
    draft: Draft,
    logits: Tensor,
    params: FilterParams,
    uniforms: VerifyUniforms,
    *,
    by_block: bool,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
) -> Verdict:
    """As the definition; a program has `num_warps` warps and `block` tokens, a power of two."""
    (count, width), device = draft.tokens.shape, logits.device
    tokens = torch.empty(count, width + 1, dtype=torch.long, device=device)
    outcome = OutputTables(tokens, torch.empty_like(tokens[:, 0]))
    if count:
        inputs = Inputs(
            draft.tokens.contiguous(),
            None if draft.probs is None else table_of(draft.probs),
            None if draft.num_valid is None else draft.num_valid.contiguous(),
            table_of(uniforms.accept),
            table_of(uniforms.resample[:, None]),
        )
        by_block = by_block and draft.probs is not None and width > 0  # else the rules are the same
        with torch.cuda.device_of(logits):
            _launch(rows_of(logits, params), inputs, outcome, by_block, block, num_warps)
    return Verdict(*outcome, draft.num_valid)


def _launch(rows, inputs, outcome, by_block: bool, block: int, num_warps: int) -> None:
    """Fills `outcome`."""
    (count, width), device = inputs.tokens.shape, inputs.tokens.device
    partials = softmax_partials(rows, block=block, num_warps=num_warps, num_valid=inputs.num_valid)
    row_max = torch.empty(count, width + 1, dtype=torch.float32, device=device)
    one_hot = torch.empty_like(row_max, dtype=torch.int32)
    path = torch.empty_like(row_max, dtype=torch.float64)
    target = TargetTables(row_max, torch.empty_like(row_max), one_hot, path)
    num_residuals, num_chunks = width if by_block else 1, partials.num_chunks
    sums = torch.empty(count, num_residuals, num_chunks, dtype=torch.float32, device=device)
    residuals = Residuals(sums, num_residuals)
    tables = VerifyTables(rows, inputs, partials, target, residuals, outcome)
    sizes = {"by_block": by_block, "width": width, **NO_FUSION}
    padded_chunks = triton.next_power_of_2(num_chunks)
    padded = {"padded_indices": triton.next_power_of_2(width + 1), "padded_chunks": padded_chunks}
    _accept_kernel[(count,)](tables, **sizes, **padded)
    if width:
        _residual_kernel[(count, num_residuals, num_chunks)](
            tables, **sizes, block=block, num_warps=num_warps
        )
    _finalize_kernel[(count,)](tables, **sizes, **padded, block=block)


@triton.jit
def _read_num_valid(inputs, row, width: tl.constexpr):
    """How many of a row's draft tokens are valid."""
    num_valid = tl.full((), width, tl.int64)
    if inputs.num_valid is not None:
        num_valid = tl.load(inputs.num_valid + row)
    return num_valid


@triton.jit
def _follow_path(index, p, q, width: tl.constexpr):
    """P_0..P_K, `[P]` float64, from the probabilities of the draft tokens."""
    path = tl.full(index.shape, 1.0, tl.float64)
    product = tl.full((), 1.0, tl.float64)
    for i in tl.static_range(width):
        product *= tl.sum(tl.where(index == i, p / q, 0.0), axis=0)
        product = tl.where(product > 1, 1.0, product)  # NaN stays, and is never accepted
        path = tl.where(index == i + 1, product, path)
    return path


@triton.jit
def _accept_kernel(
    t,
    by_block: tl.constexpr,
    width: tl.constexpr,
    padded_indices: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    """One program per row. Fills `t.target`; by the token rule the number accepted, too."""
    row, index = tl.program_id(0), tl.arange(0, padded_indices)
    num_valid = _read_num_valid(t.inputs, row, width)
    distribution = merge_partials(t.rows, t.partials, row, index, num_valid, padded_chunks)
    is_drafted = index < num_valid
    token = tl.load(t.inputs.tokens + row * width + index, is_drafted, -1)
    p = read_probs(t.rows, row, index, distribution, token).to(tl.float64)
    q = tl.full((padded_indices,), 1.0, tl.float64)
    if t.inputs.probs is not None:
        is_token = (token >= 0) & (token < t.rows.vocab)
        q = tl.load(row_start(t.inputs.probs, row, index) + token, is_token, 0.0).to(tl.float64)
    path = tl.full((padded_indices,), 1.0, tl.float64)
    if by_block:
        path = _follow_path(index, p, q, width)
    else:
        u = tl.load(row_start(t.inputs.accept, row, index), is_drafted, 0.0)
        first_rejected = tl.min(tl.where(is_drafted & (u * q < p), padded_indices, index), axis=0)
        tl.store(t.outcome.num_accepted + row, first_rejected.to(tl.int64))
    row_max, row_sum, one_hot = distribution
    entry, is_index = row * (width + 1) + index, index <= width
    tl.store(t.target.row_max + entry, row_max, is_index)
    tl.store(t.target.row_sum + entry, row_sum, is_index)
    tl.store(t.target.one_hot + entry, one_hot, is_index)
    tl.store(t.target.path + entry, path, is_index)


@triton.jit
def _read_target(t, row, index, width: tl.constexpr):
    """The distribution at a row's window index, for `read_probs`."""
    entry = row * (width + 1) + index
    row_max, row_sum = tl.load(t.target.row_max + entry), tl.load(t.target.row_sum + entry)
    return row_max, row_sum, tl.load(t.target.one_hot + entry)


@triton.jit
def _read_residual(t, row, index, distribution, is_short, ids, width: tl.constexpr):
    """Weights of tokens `ids` that the extra token is drawn from. Where nothing was rejected
    (`is_short` is false) the draft counts as 0 and P_i as 1.
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
    return tl.maximum(residual, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _residual_kernel(t, by_block: tl.constexpr, width: tl.constexpr, block: tl.constexpr):
    """One program per chunk of a residual; by the token rule only that of the rejected token."""
    row, residual_id = tl.program_id(0), tl.program_id(1)
    chunk = tl.num_programs(2) - 1 - tl.program_id(2)  # those read last may still be in the cache
    index = residual_id.to(tl.int64)
    if not by_block:
        index = tl.load(t.outcome.num_accepted + row)
    is_short = index < _read_num_valid(t.inputs, row, width)
    if is_short:
        ids, distribution = chunk * block + tl.arange(0, block), _read_target(t, row, index, width)
        residual = _read_residual(t, row, index, distribution, is_short, ids, width)
        into = tl.cast(row, tl.int64) * t.residuals.num_residuals + residual_id
        into = into * t.partials.num_chunks + chunk
        tl.store(t.residuals.sums + into, tl.sum(residual, axis=0))


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
    weights = _read_residual(t, row, count, distribution, is_short, ids, width)
    token = first + find_past_in_chunk(weights, threshold - before, block)
    return tl.minimum(token, t.rows.vocab - 1)


@triton.jit
def _finalize_kernel(
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
    num_valid, chunk = _read_num_valid(t.inputs, row, width), tl.arange(0, padded_chunks)
    count = tl.full((), 0, tl.int64)
    if not by_block:
        count = tl.load(t.outcome.num_accepted + row)
    residual_id = index if by_block else tl.arange(0, 1)
    is_read = (residual_id if by_block else count + residual_id) < num_valid
    at = tl.cast(row, tl.int64) * t.residuals.num_residuals + residual_id
    at = at[:, None] * t.partials.num_chunks + chunk[None]
    is_chunk = is_read[:, None] & (chunk < t.partials.num_chunks)[None]
    sums = tl.load(t.residuals.sums + at, is_chunk, 0.0).to(tl.float64)  # [S, C]
    if by_block:
        count = _longest_prefix(t, row, index, num_valid, tl.sum(sums, axis=1), width)
        sums = tl.where((index == count)[:, None], sums, 0.0)
    sums, is_short = tl.sum(sums, axis=0), count < num_valid
    extra = _draw_extra(t, row, count, sums, is_short, width, block, padded_chunks)
    token = tl.load(t.inputs.tokens + row * width + index, index < count, PAD)
    token = tl.where(index == count, extra, token)
    tl.store(t.outcome.tokens + row * (width + 1) + index, token, index <= width)
    tl.store(t.outcome.num_accepted + row, count)
