"""`race` on a GPU: one launch over chunks, whose noise is made in registers, and one over rows.

Legend: B rows, N places of a window, V vocabulary, C chunks of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gate import Gate
from specdec.kernels.triton_launch import overlap, wait_for_last
from specdec.kernels.triton_laws import INFINITY, laws_of, pass_gate, read_gate, read_logits
from specdec.kernels.triton_philox import token_uniforms

BLOCK = 1024
NUM_WARPS = 4


def race(
    logits: Tensor,
    gate: Gate,
    key: Tensor,
    position: Tensor,
    stream: int,
    *,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
) -> Tensor:
    """As `ops.race`; one program of `num_warps` warps races `block` tokens of a row."""
    laws = laws_of(logits, gate)
    shape = *logits.shape[:2], triton.cdiv(laws.vocab, block)
    device = logits.device
    largest = torch.empty(shape, dtype=torch.float32, device=device)
    times = torch.empty(shape, dtype=torch.float64, device=device)
    winners = torch.empty(shape, dtype=torch.int32, device=device)
    tokens = torch.empty(shape[:2], dtype=torch.long, device=device)
    heats = largest, times, winners
    with torch.cuda.device_of(logits):
        _heat_kernel[(winners.numel(),)](
            laws,
            key.contiguous(),
            position.contiguous(),
            stream,
            *heats,
            shape[2],
            block=block,
            num_warps=num_warps,
            **overlap(logits),
        )
        _final_kernel[(tokens.numel(),)](
            laws,
            *heats,
            tokens,
            shape[2],
            padded_chunks=triton.next_power_of_2(shape[2]),
            **overlap(logits),
        )
    return tokens


@triton.jit
def _heat_kernel(
    laws,
    key,
    position,
    stream,
    largest,
    times,
    winners,
    chunks,
    is_early: tl.constexpr,
    block: tl.constexpr,
):
    """The winner of each chunk, and its time over weights relative to the chunk's largest."""
    wait_for_last(is_early)
    spot, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    row, place = spot // laws.places, spot % laws.places
    uniforms = token_uniforms(key, row, tl.load(position + spot), stream, chunk, block)
    ids = chunk * block + tl.arange(0, block)
    gate = read_gate(laws, row, place)
    x = pass_gate(laws, gate, ids, read_logits(laws, row, place, ids))
    peak = tl.max(x, axis=0)
    weights = tl.exp2((x - peak) * gate[0])
    # E = -log(1 - u); 1 - u is exact, since u has 52 bits. A weight that is NaN does not win.
    finish = (0.0 - tl.log(1.0 - uniforms)) / weights.to(tl.float64)
    finish = tl.where(weights > 0, finish, INFINITY)
    if laws.gate.is_greedy is not None:  # there the first of the largest wins
        finish = tl.where(tl.load(laws.gate.is_greedy + row) & (x == peak), 0.0, finish)
    slot = tl.cast(spot, tl.int64) * chunks + chunk
    tl.store(largest + slot, peak)
    tl.store(times + slot, tl.min(finish, axis=0))
    winner = chunk * block + tl.argmin(finish, axis=0)  # the first of equal times
    tl.store(winners + slot, tl.minimum(winner, laws.vocab - 1))


@triton.jit
def _final_kernel(
    laws,
    largest,
    times,
    winners,
    tokens,
    chunks,
    is_early: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    """The winner of each row: times are brought to weights relative to the row's largest."""
    wait_for_last(is_early)
    spot = tl.program_id(0)
    row = spot // laws.places
    chunk = tl.arange(0, padded_chunks)
    slots, is_chunk = tl.cast(spot, tl.int64) * chunks + chunk, chunk < chunks
    peaks = tl.load(largest + slots, mask=is_chunk, other=-INFINITY)
    finish = tl.load(times + slots, mask=is_chunk, other=INFINITY)
    peak = tl.max(peaks, axis=0)
    rate, _, _, _ = read_gate(laws, row, spot % laws.places)
    slower = tl.exp2(((peak - peaks) * rate).to(tl.float64))
    finish = tl.where(slower < INFINITY, finish * slower, INFINITY)
    if laws.gate.is_greedy is not None:
        behind = (peaks != peak).to(tl.float64)
        finish = tl.where(tl.load(laws.gate.is_greedy + row), behind, finish)
    winner = tl.load(winners + tl.cast(spot, tl.int64) * chunks + tl.argmin(finish, axis=0))
    tl.store(tokens + spot, winner.to(tl.int64))
