"""Ends of rows that the host finds: by stopping criteria, and faults that none of them precedes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteria

from specdec.arguments import shown
from specdec.loop.columns import column_of, num_ready
from specdec.request.call import Request


class Ends:
    """Asks the stopping criteria of one call, and raises for rows that have a fault. It does not
    hold the call's `OutputCollector`, which holds it.

    Args:
        request: the call.
    """

    def __init__(self, request: Request):
        rows = len(request.lengths)
        # Rows that criteria see together, and the ids `[R, T]` that they have seen of them.
        size = 1 if request.is_alone else rows
        self._groups = [range(first, first + size) for first in range(0, rows, size)]
        self._shown: dict[range, Tensor] = {}

    def find(self, collector: Any, faults: Mapping[int, str]) -> None:
        """Ends the rows whose criteria are met.

        Args:
            collector: the `OutputCollector` of the call.
            faults: texts, of rows that have a fault after their new tokens.

        Raises:
            ValueError: a row has a fault, and no criterion ends it before.
        """
        for rows in self._groups:
            if collector.request.criteria:
                self._ask_criteria(collector, rows)
            for row in faults.keys() & rows:
                is_next = len(collector.new_tokens[row]) == num_ready(collector, rows)
                if is_next and collector.finish_reasons[row] is None:
                    raise ValueError(faults[row])

    def _ask_criteria(self, collector: Any, rows: range) -> None:
        """Shows criteria every column that all rows of a group have reached, each column once,
        since criteria may keep state, and cuts rows where they are met.
        """
        request, new_tokens = collector.request, collector.new_tokens
        prompts, device = request.shown_prompts, request.padded.device
        ids = self._shown.get(rows)
        if ids is None:
            ids = torch.tensor([prompts[row] for row in rows], dtype=torch.long, device=device)
        while (column := ids.shape[1] - len(prompts[rows[0]])) < num_ready(collector, rows):
            new = torch.tensor(column_of(collector, rows, column), device=device)
            self._shown[rows] = ids = torch.cat([ids, new[:, None]], dim=1)
            answers = _are_met(request.criteria, ids)
            for row, is_met in zip(rows, answers, strict=True):
                if is_met and column < len(new_tokens[row]):
                    _cut(collector, row, column + 1)


def _cut(collector: Any, row: int, count: int) -> None:
    """Ends a row after so many new tokens."""
    surplus, steps = len(collector.new_tokens[row]) - count, collector.steps[row]
    if surplus or collector.finish_reasons[row] != "eos":
        collector.finish_reasons[row] = "stop"
    del collector.new_tokens[row][count:]
    while surplus > 0:
        surplus -= len(steps[-1].new_tokens)
        steps[-1].cut(max(-surplus, 0))
        if surplus >= 0:
            steps.pop()
    collector.generation.end_rows([row])


def _are_met(criteria: Iterable[StoppingCriteria], ids: Tensor) -> list[bool]:
    """Which of the rows of ids `[R, T]` end there; all criteria are called, as in HF."""
    is_met = torch.zeros(len(ids), dtype=torch.bool, device="cpu")
    for criterion in criteria:
        answer = criterion(ids, None)
        if isinstance(answer, bool | np.bool_):
            answer = torch.tensor(bool(answer), device="cpu")
        is_flag = isinstance(answer, Tensor) and answer.dtype == torch.bool
        if not (is_flag and (answer.numel() == 1 or answer.shape == is_met.shape)):
            name = getattr(criterion, "__name__", type(criterion).__name__)
            raise TypeError(
                f"the stopping criterion {name} returned {shown(answer)} for ids "
                f"{list(ids.shape)}; expected a bool tensor of shape {list(is_met.shape)}, or True "
                "or False"
            )
        is_met |= answer.cpu().reshape(-1)
    return is_met.tolist()
