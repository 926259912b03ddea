"""Outputs: what a call keeps of every new token. Each is a record; the loop knows its name only.

An output is added by a record here and a keyword in `request.keywords`.

Legend: B rows, K draft tokens (nodes of a tree), D tokens of its longest path (K for a chain), V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.kernels.verify.reference import take_rows
from specdec.loop.state import StepState
from specdec.row_step import RowStep
from specdec.samplers.logits_filter import logprobs_of
from specdec.types import Draft, TargetOutput, Verdict

OfStep = Callable[[StepState, Draft, Verdict, TargetOutput, Tensor], Tensor]
"""(state, draft, verdict, output, logits) -> `[B, D + 1, ...]` of the emitted tokens. `output` has
the target's own logits `[B, K + 1, V]`, and `logits` are those that the sampler saw. What stands in
columns that hold no token is without meaning.
"""


class Output(NamedTuple):
    """What is kept of every new token.

    Args:
        name: in `GenerationResult.outputs`.
        of_step: computes it in a step, which may be captured.
        is_number: it is `[B, D + 1]`, goes to the host with the tokens, and stands in
            `RowStep.outputs`. Else it has more dimensions and stays on the device.
    """

    name: str
    of_step: OfStep
    is_number: bool = False


def _scores(
    state: StepState, draft: Draft, verdict: Verdict, output: TargetOutput, logits: Tensor
) -> Tensor:
    return state.logits_filter.scores(_along(logits, draft, verdict))


def _logits(
    state: StepState, draft: Draft, verdict: Verdict, output: TargetOutput, logits: Tensor
) -> Tensor:
    return _along(output.logits, draft, verdict).float()


def _logprobs(
    state: StepState, draft: Draft, verdict: Verdict, output: TargetOutput, logits: Tensor
) -> Tensor:
    tokens = verdict.tokens.clamp(0, state.vocab_size - 1)
    return logprobs_of(tokens, _scores(state, draft, verdict, output, logits))


def _raw_logprobs(
    state: StepState, draft: Draft, verdict: Verdict, output: TargetOutput, logits: Tensor
) -> Tensor:
    tokens = verdict.tokens.clamp(0, state.vocab_size - 1)
    return logprobs_of(tokens, _along(output.logits, draft, verdict))


def _along(table: Tensor, draft: Draft, verdict: Verdict) -> Tensor:
    """Rows `[B, D + 1, ...]` of the window that the emitted tokens follow: the j-th follows row j,
    of a tree row `path[:, j]`.
    """
    if draft.is_chain:
        return table
    return take_rows(table, verdict.path.clamp(0, table.shape[1] - 1))


RECORDS = {
    record.name: record
    for record in (
        Output("scores", _scores),
        Output("logits", _logits),
        Output("logprobs", _logprobs, is_number=True),
        Output("raw_logprobs", _raw_logprobs, is_number=True),
    )
}


def outputs_of(
    state: StepState, draft: Draft, verdict: Verdict, output: TargetOutput, logits: Tensor
) -> dict[str, Tensor]:
    """The outputs of a step, by name."""
    step = state, draft, verdict, output, logits
    return {name: RECORDS[name].of_step(*step) for name in state.signature.outputs}


class OutputTables:
    """Joins the outputs of a call's steps.

    Args:
        names: of the outputs.
        rows: B.
    """

    def __init__(self, names: Sequence[str], rows: int):
        self._names = names
        self._kept: dict[str, list[list[Tensor]]] = {
            name: [[] for _ in range(rows)] for name in names if not RECORDS[name].is_number
        }

    def add(self, row: int, index: int, count: int, outputs: Mapping[str, Any]) -> None:
        """Takes over a row's first `count` tokens of a step, whose row is `index`."""
        for name, own in self._kept.items():
            own[row].append(outputs[name][index, :count].clone())

    def joined(self, steps: Sequence[Sequence[RowStep]], device: torch.device) -> dict[str, Any]:
        """Numbers as a float32 `[B, M]` of the steps' new tokens, 0 after a row's end; else for
        each new column `[B, ...]`, NaN after a row's end, `None` where a row has no new token.
        """
        found: dict[str, Any] = {}
        for name in self._names:
            if name not in self._kept:
                rows = [[number for step in row for number in step.outputs[name]] for row in steps]
                numbers = [torch.tensor(row, dtype=torch.float32, device="cpu") for row in rows]
                found[name] = pad_sequence(numbers, batch_first=True).to(device)
                continue
            found[name] = None
            if all(kept := self._kept[name]):
                counts = [sum(len(step.new_tokens) for step in row) for row in steps]
                pairs = zip(kept, counts, strict=True)
                blocks = [torch.cat(own)[:count] for own, count in pairs]  # [n, ...]
                padded = pad_sequence(blocks, batch_first=True, padding_value=torch.nan)
                found[name] = padded.unbind(dim=1)
        return found
