"""`sample` on a GPU: two launches, one that measures the rows, and one that draws and writes laws.

Legend: B rows, N places of a window, V vocabulary, C chunks of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gate import Gate
from specdec.kernels.triton_launch import overlap, wait_for_last
from specdec.kernels.triton_laws import laws_of, pass_gate, read_gate, read_logits
from specdec.kernels.triton_rows import combine, find_past, measure_rows, pick, pick_law, weigh

BLOCK = 4096
NUM_WARPS = 8


def sample(
    logits: Tensor,
    gate: Gate,
    uniforms: Tensor,
    *,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
) -> tuple[Tensor, Tensor]:
    """As `ops.sample`; for the options see `triton_verify.verify`."""
    window = logits[:, None] if logits.dim() == 2 else logits
    laws = laws_of(window, gate)
    law = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(uniforms.shape, dtype=torch.long, device=logits.device)
    with torch.cuda.device_of(logits):
        measures = measure_rows(laws, block=block, num_warps=num_warps)
        _sample_kernel[(window.shape[0] * laws.places * (measures.chunks + 1),)](
            laws,
            measures,
            uniforms.contiguous(),
            law,
            tokens,
            block=block,
            padded_chunks=triton.next_power_of_2(measures.chunks),
            num_warps=num_warps,
            **overlap(logits),
        )
    return tokens, law


@triton.jit
def _weigh(laws, gate, law, row, place, ids):
    x = pass_gate(laws, gate, ids, read_logits(laws, row, place, ids))
    return weigh(laws, gate[0], law, 1.0, ids, x)


@triton.jit
def _sample_kernel(
    laws,
    measures,
    uniforms,
    law,
    tokens,
    is_early: tl.constexpr,
    block: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    """A program for each chunk of a row writes its law; before them one draws the row's token."""
    programs = measures.chunks + 1
    spot, chunk = tl.program_id(0) // programs, tl.program_id(0) % programs - 1
    row, place = spot // laws.places, spot % laws.places
    gate = read_gate(laws, row, place)
    alone = place + tl.arange(0, 1)
    wait_for_last(is_early)
    law_of, shares = combine(
        measures, laws, row, alone, place, gate[0], block, padded_chunks, False
    )
    target, shares = pick_law(law_of, alone, place), pick(shares, alone, place)
    if chunk < 0:
        threshold = tl.load(uniforms + spot) * tl.sum(shares, axis=0)
        drawn, before = find_past(shares, threshold, padded_chunks)
        drawn = tl.minimum(drawn, measures.chunks - 1)  # past the end only where all is NaN
        ids = drawn * block + tl.arange(0, block)
        probs = _weigh(laws, gate, target, row, place, ids)
        index, _ = find_past(probs.to(tl.float64), threshold - before, block)
        tl.store(tokens + spot, tl.minimum(drawn * block + index, laws.vocab - 1).to(tl.int64))
    else:
        ids = chunk * block + tl.arange(0, block)
        probs = _weigh(laws, gate, target, row, place, ids)
        start = law + tl.cast(spot, tl.int64) * laws.vocab
        tl.store(start + ids, probs, mask=ids < laws.vocab)
