"""The tables of a verdict, and the launch that applies the acceptance rule to every row's draft
tokens. The letters are those of `verify.reference`.

Legend: B rows, K draft tokens (width), N = K + 1 window indices, V vocabulary, C chunks of a row, P
window indices padded to a power of two, S residuals of a row: K by the block rule, one by the token
rule.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_common import (
    Partials,
    Rows,
    Table,
    merge_partials,
    read_probs,
    row_start,
)
from specdec.types import Fault

DRAFT_TOKEN = tl.constexpr(int(Fault.DRAFT_TOKEN))


class Inputs(NamedTuple):
    """A draft and the uniforms."""

    tokens: Tensor  # [B, K] int64, contiguous
    probs: Table | None  # [B, K, V]; None for point masses
    num_valid: Tensor | None  # [B] int64, or None for K
    accept: Table  # [B, K] float64
    resample: Table  # [B, 1] float64


class Target(NamedTuple):
    """The target's distributions, as all launches after `accept_kernel` compute them: the first
    three are the tuple for `read_probs`.
    """

    row_max: Tensor  # [B, N] float32, the largest logit
    row_sum: Tensor  # [B, N] float32, NaN where the logits give no distribution
    one_hot: Tensor  # [B, N] int32
    path: Tensor  # [B, N] float64, P_0..P_K of the block rule; 1 by the token rule


class Residuals(NamedTuple):
    """Sums over the chunks of residuals, `[B, S, C]` float32 each."""

    residual: Tensor  # of max(0, P_i * target - draft)
    draft: Tensor  # of the draft probabilities, NaN where one is negative
    num_residuals: int  # S


class Outcome(NamedTuple):
    """What is returned, int64."""

    tokens: Tensor  # [B, K + 1]
    num_accepted: Tensor  # [B]
    faults: Tensor  # [B]


class Tables(NamedTuple):
    """All tables of a verdict, as one kernel argument, in the order in which they are filled."""

    rows: Rows
    inputs: Inputs
    partials: Partials
    target: Target
    residuals: Residuals
    outcome: Outcome


@triton.jit
def read_num_valid(inputs, row, width: tl.constexpr):
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
def accept_kernel(
    t,
    by_block: tl.constexpr,
    width: tl.constexpr,
    padded_indices: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    """One program per row. Fills `t.target`; by the token rule the number of accepted tokens, too;
    and whether a draft token is impossible under its own probabilities, in the faults.
    """
    row, index = tl.program_id(0), tl.arange(0, padded_indices)
    num_valid = read_num_valid(t.inputs, row, width)
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
    is_impossible = is_drafted & ((q > 0) == 0)  # a q that is NaN is not above 0
    tl.store(t.outcome.faults + row, tl.max(is_impossible.to(tl.int64), axis=0) * DRAFT_TOKEN)
    row_max, row_sum, one_hot = distribution
    entry, is_index = row * (width + 1) + index, index <= width
    tl.store(t.target.row_max + entry, row_max, is_index)
    tl.store(t.target.row_sum + entry, row_sum, is_index)
    tl.store(t.target.one_hot + entry, one_hot, is_index)
    tl.store(t.target.path + entry, path, is_index)
