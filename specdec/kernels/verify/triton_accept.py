"""The launch that applies the acceptance rule to every row's draft tokens, and the records of a
verdict. The letters are those of `verify.reference`.

Legend: B rows, K draft tokens (width), N = K + 1 window indices, V vocabulary, P window indices
padded to a power of two.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_common import (
    Table,
    merge_partials,
    probs_of,
    read_logits,
    read_params,
    row_start,
)
from specdec.types import Fault

DRAFT_TOKEN = tl.constexpr(int(Fault.DRAFT_TOKEN))


class Inputs(NamedTuple):
    """A draft and the uniforms, as a kernel argument.

    Args:
        tokens: `[B, K]` int64, contiguous.
        probs: `[B, K, V]`; `None` for point masses.
        num_valid: `[B]` int64, or `None` for K.
        accept: `[B, K]` float64.
        resample: `[B, 1]` float64.
    """

    tokens: Tensor
    probs: Table | None
    num_valid: Tensor | None
    accept: Table
    resample: Table


class Target(NamedTuple):
    """The target's distributions as every later launch computes them, and what the draft tokens
    make of them.

    Args:
        row_max: `[B, N]` float32, the largest logit; these three are the tuple for `probs_of`.
        scale: `[B, N]` float32, NaN where the logits give no distribution.
        one_hot: `[B, N]` int32.
        path: `[B, N]` float64, P_0..P_K of the block rule; 1 by the token rule.
    """

    row_max: Tensor
    scale: Tensor
    one_hot: Tensor
    path: Tensor


class Outcome(NamedTuple):
    """tokens `[B, K + 1]`, num_accepted `[B]` and faults `[B]`, int64. By the token rule the accept
    launch writes num_accepted; the last launch writes the rest.
    """

    tokens: Tensor
    num_accepted: Tensor
    faults: Tensor


@triton.jit
def read_num_valid(inputs, row, width: tl.constexpr):
    """How many of a row's draft tokens are valid."""
    num_valid = tl.full((), width, tl.int64)
    if inputs.num_valid is not None:
        num_valid = tl.load(inputs.num_valid + row)
    return num_valid


@triton.jit
def read_target(target, row, index, width: tl.constexpr):
    """The distribution at a row's window index, for `probs_of`, and its P."""
    slot = row * (width + 1) + index
    distribution = (
        tl.load(target.row_max + slot),
        tl.load(target.scale + slot),
        tl.load(target.one_hot + slot),
    )
    return distribution, tl.load(target.path + slot)


@triton.jit
def _follow_path(index, p, q, width: tl.constexpr):
    """P_0..P_K, `[P]` float64, of the draft tokens' probabilities."""
    path = tl.full(index.shape, 1.0, tl.float64)
    product = tl.full((), 1.0, tl.float64)
    for i in tl.static_range(width):
        product *= tl.sum(tl.where(index == i, p / q, 0.0), axis=0)
        product = tl.where(product > 1, 1.0, product)  # NaN stays, and is never accepted
        path = tl.where(index == i + 1, product, path)
    return path


@triton.jit
def accept_kernel(
    rows,
    inputs,
    partials,
    target,
    outcome,
    by_block: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    padded_indices: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    """One program per row. Writes `target`; by the token rule `outcome.num_accepted`, too; and the
    draft tokens that are impossible under their own probabilities as faults.
    """
    row, index = tl.program_id(0), tl.arange(0, padded_indices)
    num_valid, params = read_num_valid(inputs, row, width), read_params(rows, row, index)
    distribution, _ = merge_partials(
        rows, partials, row, index, index <= num_valid, params[0], block, padded_chunks
    )
    is_drafted = index < num_valid
    token = tl.load(inputs.tokens + row * width + index, is_drafted, -1)
    x = read_logits(rows, row, index, token)
    p = probs_of(rows, params, distribution, token, x).to(tl.float64)
    q = tl.full((padded_indices,), 1.0, tl.float64)
    if inputs.probs is not None:
        is_token = (token >= 0) & (token < rows.vocab)
        q = tl.load(row_start(inputs.probs, row, index) + token, is_token, 0.0).to(tl.float64)
    path = tl.full((padded_indices,), 1.0, tl.float64)
    if by_block:
        path = _follow_path(index, p, q, width)
    else:
        u = tl.load(row_start(inputs.accept, row, index), is_drafted, 0.0)
        first_rejected = tl.min(tl.where(is_drafted & (u * q < p), padded_indices, index), axis=0)
        tl.store(outcome.num_accepted + row, first_rejected.to(tl.int64))
    is_impossible = is_drafted & ((q > 0) == 0)  # a q that is NaN is not above 0
    fault = tl.max(is_impossible.to(tl.int64), axis=0) * DRAFT_TOKEN
    tl.store(outcome.faults + row, fault)
    row_max, scale, one_hot = distribution
    slot, is_index = row * (width + 1) + index, index <= width
    tl.store(target.row_max + slot, row_max, is_index)
    tl.store(target.scale + slot, scale, is_index)
    tl.store(target.one_hot + slot, one_hot, is_index)
    tl.store(target.path + slot, path, is_index)
