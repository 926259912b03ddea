"""`sample` and `sample_tokens` on a GPU, in two launches: softmax partials; then, for each row, one
program that draws and, if probabilities are wanted, one per chunk that writes them.

Legend: B rows, N window indices, V vocabulary, C chunks of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_common import (
    NO_FUSION,
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
from specdec.kernels.types import FilterParams

BLOCK, NUM_WARPS = 4096, 4


def sample(
    logits: Tensor,
    params: FilterParams,
    uniforms: Tensor,
    probs: Tensor | None,
    *,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
) -> Tensor:
    """The tokens of the definition; fills `probs`, of the shape of `logits`, if it is given.

    A program has `num_warps` warps and `block` tokens, a power of two.
    """
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
    one = index + tl.arange(0, 1)
    distribution = merge_partials(rows, partials, row, one, index, padded_chunks)
    if item == 0:
        chunks = chunk_probs(rows, partials, row, index, distribution, block, padded_chunks)
        threshold = tl.load(row_start(uniforms, row, index)) * tl.sum(chunks, axis=0)
        chunk, before = find_past(chunks, threshold, padded_chunks)
        first = tl.minimum(chunk, partials.num_chunks - 1) * block  # past the end where all is NaN
        weights = read_probs(rows, row, index, distribution, first + tl.arange(0, block))
        token = first + find_past_in_chunk(weights, threshold - before, block)
        token = tl.minimum(token, rows.vocab - 1).to(tl.int64)
        tl.store(tokens + row * rows.num_indices + index, token)
    elif probs is not None:
        ids = (item - 1) * block + tl.arange(0, block)
        p = read_probs(rows, row, index, distribution, ids)
        tl.store(row_start(probs, row, index) + ids, p, mask=ids < rows.vocab)
