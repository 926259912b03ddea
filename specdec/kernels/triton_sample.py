"""`sample` and `choose` on a GPU: two launches that overlap, one that measures the rows, and one
whose programs draw, one for each row, and write the laws.

Legend: B rows, N places of a window, V vocabulary, C chunks of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gate import Gate
from specdec.kernels.triton_draw import draw
from specdec.kernels.triton_launch import SHARED, overlap, wait_for_last
from specdec.kernels.triton_laws import Laws, laws_of, pass_gate, point_to, read_gate, read_logits
from specdec.kernels.triton_rows import (
    Measures,
    combine,
    measure,
    new_measures,
    pick,
    pick_law,
    weigh,
)

BLOCK = 4096
NUM_WARPS = 4
SPAN = 2  # chunks that a program writes


def sample(
    logits: Tensor,
    gate: Gate,
    uniforms: Tensor,
    into: Tensor | None = None,
    *,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
) -> tuple[Tensor, Tensor]:
    """As `ops.sample`; for the options see `triton_verify.verify`."""
    law = into
    if into is None:
        law = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    return _draw(logits, gate, uniforms, law, block, num_warps), law


def choose(
    logits: Tensor,
    gate: Gate,
    uniforms: Tensor,
    *,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
) -> Tensor:
    """As `ops.choose`; for the options see `triton_verify.verify`."""
    return _draw(logits, gate, uniforms, None, block, num_warps)


def _draw(
    logits: Tensor, gate: Gate, uniforms: Tensor, law: Tensor | None, block: int, num_warps: int
) -> Tensor:
    """Tokens; their laws are written if there is a table for them."""
    tokens = torch.empty(uniforms.shape, dtype=torch.long, device=logits.device)
    if logits.dim() == 2:
        logits, uniforms = logits[:, None], uniforms[:, None]
        law = None if law is None else law[:, None]
    laws = laws_of(logits, gate)
    rows, chunks = len(logits), triton.cdiv(laws.vocab, block)
    spans = 0 if law is None else triton.cdiv(chunks, SPAN)
    with torch.cuda.device_of(logits):
        measures = _measure(laws, block=block, num_warps=num_warps)
        _sample_kernel[(1 + spans, laws.places, rows)](
            laws,
            measures,
            uniforms,
            *uniforms.stride(),
            tokens,
            law,
            *((0, 0) if law is None else law.stride()[:2]),
            span=SPAN,
            block=block,
            padded_chunks=triton.next_power_of_2(chunks),
            num_warps=num_warps,
            enable_fp_fusion=False,
            **overlap(logits),
        )
    return tokens


def _measure(laws: Laws, *, block: int, num_warps: int) -> Measures:
    """Measures all rows in one launch."""
    measures = new_measures(laws.logits, laws.gate, block)
    _measure_kernel[(measures.chunks, laws.places, laws.logits.shape[0])](
        laws,
        measures,
        block=block,
        threads=32 * num_warps,
        num_warps=num_warps,
        enable_fp_fusion=False,
        **overlap(laws.logits),
    )
    return measures


@triton.jit
def _measure_kernel(
    laws, measures, is_early: tl.constexpr, block: tl.constexpr, threads: tl.constexpr
):
    wait_for_last(is_early)
    chunk, place, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    measure(measures, laws, row, place, chunk, False, block, threads)


@triton.jit
def _sample_kernel(
    laws,
    measures,
    uniforms,
    uniform_row_stride,
    uniform_place_stride,
    tokens,
    law,
    row_stride,
    place_stride,
    is_early: tl.constexpr,
    span: tl.constexpr,
    block: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    item, place = tl.program_id(0), tl.program_id(1)
    row = tl.num_programs(2) - 1 - tl.program_id(2)  # the last measured, which are in the cache
    spot = row * laws.places + place
    if item == 0:
        wait_for_last(is_early)
        order, shares = _combine(laws, measures, row, place, block, padded_chunks)
        total = tl.sum(shares, axis=0)
        u = tl.load(point_to(uniforms, row, place, uniform_row_stride, uniform_place_stride))
        token = draw(
            None, laws, (row, place), order, -1, shares, total, u, False, padded_chunks, block
        )
        tl.store(tokens + spot, token)
    elif law is not None:
        # The logits are read while the last rows are measured, in one piece: behind a store no more
        # would be read in advance, since for all the compiler knows it may change them.
        size: tl.constexpr = span * block
        ids = (item - 1) * size + tl.arange(0, size)
        is_whole = item * size <= laws.vocab
        x = _read(laws, row, place, ids, is_whole)
        wait_for_last(is_early)
        order, _ = _combine(laws, measures, row, place, block, padded_chunks)
        gate, own, _ = order
        probs = weigh(laws, gate[0], own, 1.0, ids, pass_gate(laws, gate, ids, x))
        into = point_to(law, row, place, row_stride, place_stride) + ids
        if is_whole:
            tl.store(into, probs)
        else:
            tl.store(into, probs, mask=ids < laws.vocab)


@triton.jit
def _read(laws, row, place, ids, is_whole):
    if is_whole:
        start = point_to(laws.logits, row, place, laws.row_stride, laws.place_stride)
        x = tl.load(start + ids, cache_modifier=SHARED)
    else:
        x = read_logits(laws, row, place, ids, is_early=True)
    return x


@triton.jit
def _combine(laws, measures, row, place, block: tl.constexpr, padded_chunks: tl.constexpr):
    """The gate and the law of a spot, with a factor of 1, and the probabilities of its chunks."""
    gate, alone = read_gate(laws, row, place), place + tl.arange(0, 1)
    law, shares = combine(measures, laws, row, alone, place, gate[0], block, padded_chunks, False)
    return (gate, pick_law(law, alone, place), 1.0), pick(shares, alone, place)
