"""`race` on a GPU, in two launches: the winner of every chunk, with noise made in registers; then
the winner of every row.

Legend: B rows, N window indices, V vocabulary, C chunks of a row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.philox.triton import token_uniforms
from specdec.kernels.triton_common import INFINITY, read_logits, read_rate, rows_of
from specdec.kernels.types import FilterParams

BLOCK, NUM_WARPS = 1024, 4


class Heats(NamedTuple):
    """The race within every chunk."""

    row_max: Tensor  # [B, N, C] float32, the chunk's largest logit
    time: Tensor  # [B, N, C] float64, the least arrival time, with weights relative to row_max
    winner: Tensor  # [B, N, C] int32, the token that arrives then
    num_chunks: int  # C


def race(
    logits: Tensor,
    params: FilterParams,
    key: Tensor,
    position: Tensor,
    stream: int,
    *,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
) -> Tensor:
    """As the definition; a program has `num_warps` warps and `block` tokens, a power of two."""
    rows, device = rows_of(logits, params), logits.device
    shape = *logits.shape[:2], triton.cdiv(rows.vocab, block)
    row_max = torch.empty(shape, dtype=torch.float32, device=device)
    time = torch.empty(shape, dtype=torch.float64, device=device)
    winner = torch.empty(shape, dtype=torch.int32, device=device)
    tokens = torch.empty(shape[:2], dtype=torch.long, device=device)
    if not tokens.numel():
        return tokens
    heats, noise = Heats(row_max, time, winner, shape[2]), (key.contiguous(), position.contiguous())
    with torch.cuda.device_of(logits):
        _heat_kernel[shape](rows, *noise, stream, heats, block=block, num_warps=num_warps)
        padded_chunks = triton.next_power_of_2(shape[2])
        _final_kernel[shape[:2]](rows, heats, tokens, padded_chunks=padded_chunks)
    return tokens


@triton.jit
def _heat_kernel(rows, key, position, stream, heats, block: tl.constexpr):
    row, index, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = row * rows.num_indices + index
    uniforms = token_uniforms(key, row, tl.load(position + entry), stream, chunk, block)
    ids = chunk * block + tl.arange(0, block)
    x = read_logits(rows, row, index, ids)
    row_max = tl.max(x, axis=0)
    weights = tl.exp2((x - row_max) * read_rate(rows, row))
    # E = -log(1 - u); 1 - u is exact, since u has 52 bits. A weight that is NaN does not win.
    time = (0.0 - tl.log(1.0 - uniforms)) / weights.to(tl.float64)
    time = tl.where(weights > 0, time, INFINITY)
    if rows.params.is_greedy is not None:  # the first of the largest logits wins
        time = tl.where(tl.load(rows.params.is_greedy + row) & (x == row_max), 0.0, time)
    entry = tl.cast(entry, tl.int64) * heats.num_chunks + chunk
    tl.store(heats.row_max + entry, row_max)
    tl.store(heats.time + entry, tl.min(time, axis=0))
    winner = chunk * block + tl.argmin(time, axis=0)  # the first of equal times
    tl.store(heats.winner + entry, tl.minimum(winner, rows.vocab - 1))


@triton.jit
def _final_kernel(rows, heats, tokens, padded_chunks: tl.constexpr):
    row, index = tl.program_id(0), tl.program_id(1)
    entry, chunk = row * rows.num_indices + index, tl.arange(0, padded_chunks)
    first, is_chunk = tl.cast(entry, tl.int64) * heats.num_chunks, chunk < heats.num_chunks
    maxima = tl.load(heats.row_max + first + chunk, mask=is_chunk, other=-INFINITY)
    time = tl.load(heats.time + first + chunk, mask=is_chunk, other=INFINITY)
    row_max = tl.max(maxima, axis=0)
    # Times are brought to weights relative to the largest logit of the row.
    slower = tl.exp2(((row_max - maxima) * read_rate(rows, row)).to(tl.float64))
    time = tl.where(slower < INFINITY, time * slower, INFINITY)
    if rows.params.is_greedy is not None:
        is_less = (maxima != row_max).to(tl.float64)  # the first chunk with the largest logit wins
        time = tl.where(tl.load(rows.params.is_greedy + row), is_less, time)
    winner = tl.load(heats.winner + first + tl.argmin(time, axis=0))
    tl.store(tokens + entry, winner.to(tl.int64))
