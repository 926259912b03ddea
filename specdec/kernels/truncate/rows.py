"""Truncation of wide logits on a CPU: row by row, with the operations of `cpu.py`.

Legend: B rows, N window indices, V vocabulary; logits are `[B, V]` or `[B, N, V]`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from specdec.kernels.truncate import cpu
from specdec.kernels.truncate.cutoff import cutoff_of, droppable_mass, scale
from specdec.kernels.types import Cutoff, FilterParams, Truncation


def probs_by_row(logits: Tensor, params: FilterParams, out: Tensor | None) -> Tensor:
    """`filtered_probs`, but for greedy rows."""
    probs = torch.empty_like(logits, dtype=torch.float32) if out is None else out
    for b, n, row in _rows(logits):
        row = scale(row, _of_row(params.temperature, b))
        if params.cutoff is not None:
            at = (values.reshape(len(logits), -1)[b, n : n + 1] for values in params.cutoff)
            row = cpu.drop_below(row, *at)
        torch.softmax(row, dim=-1, out=_window(probs)[b, n : n + 1])
    return probs


def cutoff_by_row(logits: Tensor, temperature: Tensor | None, truncation: Truncation) -> Cutoff:
    """`find_cutoff`."""
    cutoffs = []
    for b, _, row in _rows(logits):
        limits = (_of_row(values, b) for values in truncation[:3])
        row, limits = scale(row, _of_row(temperature, b)), Truncation(*limits, truncation.max_top_k)
        cutoffs.append(cutoff_of(row, limits, _drop_below_in_row, _top_p_cutoff_of_row))
    return Cutoff(*(torch.cat(v).view(logits.shape[:-1]) for v in zip(*cutoffs, strict=True)))


def _rows(logits: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """(batch row, window index, logits `[1, V]`) of every row."""
    for b, window in enumerate(_window(logits)):
        for n in range(len(window)):
            yield b, n, window[n : n + 1]


def _window(table: Tensor) -> Tensor:
    """`[B, N, V]`, N = 1 where there is no window."""
    return table[:, None] if table.dim() == 2 else table


def _of_row(values: Tensor | None, b: int) -> Tensor | None:
    """`[1]`: the value of a batch row."""
    return None if values is None else values[b : b + 1]


def _drop_below_in_row(scaled: Tensor, cutoff: Cutoff) -> Tensor:
    return cpu.drop_below(scaled, *cutoff)


def _top_p_cutoff_of_row(scaled: Tensor, top_p: Tensor) -> Cutoff:
    limit = cpu.largest_droppable(droppable_mass(top_p))
    return Cutoff(*cpu.top_p_cutoff(scaled, limit, cpu.FEW, cpu.SAMPLES))
