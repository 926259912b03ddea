"""What a step did: on the device, on its way to the host, and as plain Python values; and what was
wrong with it.

On the device, what breaks the contract of a drafter or a sampler is brought into a form that cannot
harm the step (see `step.propose` and `step.commit`). The outcome keeps ids and counts as they were
returned, and of logits and draft probabilities, which stay on the device, a few numbers
(`step.numbers_to_check`). `find_faults` looks at all of them on the host, before any token of the
step is emitted.

Legend: B rows, K draft tokens (nodes of a tree), D tokens of its longest path (K for a chain), V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.row_step import RowStep
from specdec.types import Draft, Verdict

SUM_TOLERANCE = 1e-3
"""How far the sum of draft probabilities may be from 1: float32 rounding of a wide row, and no
more."""


class Fault(IntFlag):
    """What may be wrong with a row of a step."""

    TARGET_LOGITS = 1
    DRAFT_PROBS = 2
    DRAFT_TOKEN = 4
    DRAFT_ID = 8
    NUM_VALID = 16
    NUM_ACCEPTED = 32
    EMITTED_ID = 64
    ACCEPTED_TOKEN = 128
    NUM_DRAFTED = 256
    PARENT = 512


def find_faults(told: Mapping[str, np.ndarray], vocab_size: int) -> np.ndarray:
    """What is wrong with the rows of a step: `[B]` sums of `Fault` values, 0 for a sound row.

    Draft probabilities matter of tokens that were up for decision, and logits up to the row that
    the last emitted token comes from.

    Args:
        told: `PendingOutcome.columns`. `path` and `parents` are there of trees. Of chains they are
            known, and nothing is looked up: this runs once in every step.
        vocab_size: V.
    """
    emitted, drafted = told["emitted"], told["drafted"]
    num_accepted, num_valid = told["num_accepted"], told["num_valid"]
    num_drafted = told["num_drafted"]
    width, depth = drafted.shape[1], emitted.shape[1] - 1
    index = np.arange(max(width, depth) + 1)
    is_emitted = index[: depth + 1] <= num_accepted[:, None]
    is_emitted[:, 0] = True
    is_drafted = index[:width] < num_valid[:, None]
    wrong = {
        Fault.NUM_VALID: (num_valid < 0) | (num_valid > width),
        Fault.NUM_ACCEPTED: (num_accepted < 0) | (num_accepted > num_valid),
        Fault.NUM_DRAFTED: (num_drafted < num_accepted) | (num_drafted > num_valid),
        Fault.EMITTED_ID: is_emitted & _is_outside(emitted, vocab_size),
    }
    rows, along, is_off = None, drafted, False
    if width:
        if "path" in told:
            from specdec.loop.tree_path import along_path

            rows, along, is_off = along_path(told)
            is_late = (told["parents"] < -1) | (told["parents"] >= index[:width])
            wrong[Fault.PARENT] = is_drafted & is_late
            wrong[Fault.NUM_ACCEPTED] |= num_accepted > depth
        wrong[Fault.DRAFT_ID] = is_drafted & _is_outside(drafted, vocab_size)
        is_off = is_off | (emitted[:, :depth] != along)
        wrong[Fault.ACCEPTED_TOKEN] = is_emitted[:, 1:] & is_off
    if "checked" in told:
        largest, of_draft = told["checked"][:, : width + 1], told["checked"][:, width + 1 :]
        largest = largest if rows is None else np.take_along_axis(largest, rows, axis=1)
        wrong[Fault.TARGET_LOGITS] = is_emitted & ~np.isfinite(largest)
        if of_draft.shape[1]:
            is_judged = is_drafted & (index[:width] < num_drafted[:, None])
            sums, least, own = (of_draft[:, i * width : (i + 1) * width] for i in range(3))
            is_off = ~(abs(sums - 1) <= SUM_TOLERANCE) | (least < 0)  # NaN is off
            wrong[Fault.DRAFT_PROBS] = is_judged & is_off
            wrong[Fault.DRAFT_TOKEN] = is_judged & ~(own > 0)
    faults = np.zeros(len(emitted), dtype=np.int64)
    for fault, where in wrong.items():
        if where.any():  # hardly ever
            faults |= int(fault) * (where if where.ndim == 1 else where.any(axis=1))
    return faults


def _is_outside(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Bool, where ids are none of the vocabulary; negative ones are large without their sign."""
    return ids.view(np.uint64) >= vocab_size


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one step did, still on the device.

    Args:
        draft: what was proposed, with ids and counts brought into their ranges.
        verdict: what the sampler decided, as it returned it.
        logits: `[B, K + 1, V]` of the target, that the verdict was drawn from. Where steps are
            replayed, all these tensors are overwritten by the next step.
        num_new: `[B]` tokens each row keeps: 0 for rows that had ended, fewer than emitted where a
            row ends inside the block. The next step writes into the same tensor.
        is_eos: `[B]` bool: the row ended with an end-of-sequence token in this step.
        vocab_size: V.
        checked: of `step.numbers_to_check`; `None` where nobody looks at them.
        outputs: `[B, D + 1]` or `[B, D + 1, ...]` of the emitted tokens, by name, what the call
            keeps of them.
        num_sound: `[B]` of the kept tokens, those before one that no distribution stands
            for; `None` for all of them.
    """

    draft: Draft
    verdict: Verdict
    logits: Tensor
    num_new: Tensor
    is_eos: Tensor
    vocab_size: int
    checked: Tensor | None = None
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    num_sound: Tensor | None = None

    def of_rows(self, count: int) -> Outcome:
        """The outcome of the first rows."""
        from specdec.graphs.rows import map_tensors

        return map_tensors(lambda table: table[:count], self)

    def fetch(self) -> PendingOutcome:
        """Starts the transfer to the host, of one table, and does not wait for it.

        The table is made between this step and the next one, so the next step may be issued at
        once: what it overwrites has been copied.
        """
        verdict = self.verdict
        proposed = self.draft if self.draft.proposed is None else self.draft.proposed
        columns = {
            "num_new": self.num_new,
            "num_sound": self.num_sound,
            "num_accepted": verdict.num_accepted,
            "num_drafted": verdict.num_drafted,
            "num_valid": proposed.num_valid,
            "emitted": verdict.tokens,
            "drafted": proposed.tokens,
        }
        if not proposed.is_chain:
            columns |= {"path": verdict.rows, "parents": proposed.parents}
        if self.checked is not None:  # the same bits, so that one table holds everything
            columns["checked"] = self.checked.view(torch.long)
        columns = {name: column for name, column in columns.items() if column is not None}
        columns = {name: c.unsqueeze(1) if c.dim() == 1 else c for name, c in columns.items()}
        widths = {name: column.shape[1] for name, column in columns.items()}
        table = Transfer(torch.cat([*columns.values()], dim=1))
        outputs = {
            name: Transfer(value) if value.dim() == 2 else value.clone()
            for name, value in self.outputs.items()
        }
        return PendingOutcome(table, widths, self.vocab_size, outputs)


class Transfer:
    """A copy of a tensor on its way to the host; the tensor may be overwritten by what the device
    does next.
    """

    def __init__(self, tensor: Tensor):
        self._arrived = None
        if not tensor.is_cuda:
            self._copy = tensor.clone()
            return
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
        self._copy.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def wait(self) -> Tensor:
        """The copy, once it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy


@dataclass(frozen=True, eq=False)
class PendingOutcome:
    """An outcome on its way to the host: one table, whose columns have names and widths; and its
    outputs, of which vectors stay where they are.
    """

    table: Transfer
    widths: dict[str, int]
    vocab_size: int
    outputs: Mapping[str, Transfer | Tensor] = field(default_factory=dict)

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """`[B]` counts and `[B, width]` tokens by name, counts that nobody gave included; this is
        where the host waits for the device.
        """
        table, given, end = self.table.wait().numpy(), {}, 0
        for name, width in self.widths.items():
            start, end = end, end + width
            given[name] = table[:, start:end] if name in _TABLES else table[:, start]
        if "checked" in given:
            given["checked"] = given["checked"].view(np.float64)
        everything = np.full(len(table), self.widths["drafted"])
        usual = {"num_valid": everything, "num_drafted": given.get("num_valid", everything)}
        return usual | {"num_sound": given["num_new"]} | given

    def read(self) -> list[RowStep]:
        """What the step did, row by row."""
        told = dict(self.columns)
        told.pop("checked", None)
        faults = find_faults(self.columns, self.vocab_size)
        if "num_sound" in self.widths:
            is_empty = told["num_sound"] < told["num_new"]
            told["num_sound"] = np.where(faults > 0, 0, told["num_sound"])
            faults |= int(Fault.TARGET_LOGITS) * is_empty
        elif faults.any():
            told["num_sound"] = np.where(faults > 0, 0, told["num_sound"])
        told["faults"] = faults
        rows = {name: column.tolist() for name, column in told.items()}
        columns = zip(*rows.values(), strict=True)
        steps = [_row_step(dict(zip(rows, row, strict=True))) for row in columns]
        for name, numbers in self.outputs.items():
            if isinstance(numbers, Transfer):
                for step, own in zip(steps, numbers.wait().tolist(), strict=True):
                    step.outputs[name] = own[: len(step.new_tokens)]
        return steps


_TABLES = "emitted", "drafted", "path", "parents", "checked"
"""Columns of `PendingOutcome` that are no counts."""


def _row_step(row: dict[str, Any]) -> RowStep:
    """One row of an outcome, by column."""
    new, valid, accepted = row["num_new"], row["num_valid"], row["num_accepted"]
    others = {"faults": row["faults"]}
    if row["faults"]:
        others["num_sound"] = row["num_sound"]
    if "path" in row:
        path = [index - 1 for index in row["path"][1 : accepted + 1]]
        others |= {"parents": row["parents"][:valid], "path": path}
    return RowStep(row["drafted"][:valid], accepted, row["emitted"][:new], **others)
