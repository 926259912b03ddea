"""`sample` and `sample_tokens` on a GPU, in two launches: softmax partials; then, for each row, one
program that draws and, where probabilities are wanted, one per chunk that writes them.

Legend: B rows, N window indices, V vocabulary, C chunks of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_common import (
    NO_FUSION,
    find_past,
    find_past_in_chunk,
    merge_row,
    probs_of,
    read_logits,
    read_params,
    row_start,
    rows_of,
    softmax_partials,
    table_of,
)
from specdec.kernels.truncate.reference import WarpParams

BLOCK, NUM_WARPS = 4096, 4


def sample(
    logits: Tensor,
    params: WarpParams,
    uniforms: Tensor,
    out: Tensor | None = None,
    *,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
) -> tuple[Tensor, Tensor]:
    """As `kernels.sample`; a program has `num_warps` warps and `block` tokens, a power of two."""
    if out is None:
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    return _sample(logits, params, uniforms, out, block, num_warps), out


def sample_tokens(
    logits: Tensor,
    params: WarpParams,
    uniforms: Tensor,
    *,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
) -> Tensor:
    """As `kernels.sample_tokens`; for the options see `sample`."""
    return _sample(logits, params, uniforms, None, block, num_warps)


def _sample(
    logits: Tensor,
    params: WarpParams,
    uniforms: Tensor,
    probs: Tensor | None,
    block: int,
    num_warps: int,
) -> Tensor:
    """The tokens; fills `probs` if it is given."""
    tokens = torch.empty(uniforms.shape, dtype=torch.long, device=logits.device)
    if not tokens.numel():
        return tokens
    if logits.dim() == 2:  # a window of one index
        logits, uniforms = logits[:, None], uniforms[:, None]
        probs = None if probs is None else probs[:, None]
    rows = rows_of(logits, params)
    with torch.cuda.device_of(logits):
        partials = softmax_partials(rows, block=block, num_warps=num_warps)
        num_writers = 0 if probs is None else partials.num_chunks
        _sample_kernel[(*logits.shape[:2], 1 + num_writers)](
            rows,
            partials,
            table_of(uniforms),
            tokens,
            None if probs is None else table_of(probs),
            block=block,
            padded_chunks=triton.next_power_of_2(partials.num_chunks),
            num_warps=num_warps,
            **NO_FUSION,
        )
    return tokens


@triton.jit
def _sample_kernel(
    rows, partials, uniforms, tokens, probs, block: tl.constexpr, padded_chunks: tl.constexpr
):
    row, index, item = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    params = read_params(rows, row, index)
    distribution, shares = merge_row(rows, partials, row, index, params[0], block, padded_chunks)
    if item == 0:
        u = tl.load(row_start(uniforms, row, index))
        threshold = u * tl.sum(shares, axis=0)
        chunk, before = find_past(shares, threshold, padded_chunks)
        first = tl.minimum(chunk, partials.num_chunks - 1) * block  # past the end where all is NaN
        ids = first + tl.arange(0, block)
        weights = probs_of(rows, params, distribution, ids, read_logits(rows, row, index, ids))
        offset = find_past_in_chunk(weights, threshold - before, block)
        token = tl.minimum(first + offset, rows.vocab - 1)
        tl.store(tokens + row * rows.num_indices + index, token.to(tl.int64))
    elif probs is not None:
        ids = (item - 1) * block + tl.arange(0, block)
        p = probs_of(rows, params, distribution, ids, read_logits(rows, row, index, ids))
        tl.store(row_start(probs, row, index) + ids, p, mask=ids < rows.vocab)
