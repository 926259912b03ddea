"""What a step did: on the device, on its way to the host, and as plain Python values.

On the device, what breaks the contract of a drafter or a sampler is brought into a form that cannot
harm the step (see `step.propose` and `step.commit`). The outcome keeps ids and counts as they were
returned, and `find_faults` looks at them on the host, before any token of the step is emitted.

Legend: B rows, K draft tokens (nodes of a tree), D tokens of its longest path (K for a chain), V
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.graphs.tree import map_tensors
from specdec.results import RowStep
from specdec.types import Draft, Fault, Verdict

_TEXTS = {
    Fault.TARGET_LOGITS: (
        "the target's logits hold NaN or infinity, or nothing but -inf; check the model's weights, "
        "its dtype (float16 overflows) and logits processors that forbid every token"
    ),
    Fault.DRAFT_PROBS: (
        "{drafter}: draft probabilities are negative or do not sum to 1; Draft.probs must hold "
        "probabilities over the target's vocabulary, not logits"
    ),
    Fault.DRAFT_TOKEN: (
        "{drafter}: a draft token has probability 0 in Draft.probs; it must hold the distribution "
        "that the token was actually drawn from, or be None for a deterministic proposal"
    ),
    Fault.DRAFT_ID: (
        "{drafter}: a draft token lies outside the target's vocabulary; mark tokens that are to be "
        "ignored with Draft.num_valid"
    ),
    Fault.NUM_VALID: "{drafter}: Draft.num_valid is outside 0..K",
    Fault.PARENT: (
        "{drafter}: Draft.parents of node i is outside -1..i - 1; -1 is the anchor, and a parent "
        "comes before its children"
    ),
    Fault.NUM_ACCEPTED: (
        "{sampler}: the sampler accepted fewer than 0 tokens or more than were drafted; check "
        "Verdict.num_accepted"
    ),
    Fault.NUM_DRAFTED: (
        "{sampler}: Verdict.num_drafted is less than were accepted or more than were drafted; pass "
        "draft.num_valid, or None where every row has K draft tokens"
    ),
    Fault.EMITTED_ID: (
        "{sampler}: the sampler emitted a token outside the target's vocabulary; check "
        "Verdict.tokens"
    ),
    Fault.ACCEPTED_TOKEN: (
        "{sampler}: the sampler accepted tokens that are not the draft's; Verdict.tokens must "
        "begin with the first num_accepted of draft.tokens, or those of a path from the anchor"
    ),
}
"""In the order in which one of several is named."""


def fault_text(faults: int, drafter: object, sampler: object) -> str:
    """The first of a row's faults, a sum of `Fault` values, in words that name the part whose it
    is.
    """
    text = next(text for fault, text in _TEXTS.items() if fault & faults)
    return text.format(drafter=name_of(drafter), sampler=name_of(sampler))


def name_of(part: object) -> str:
    """What messages call a part: its attribute `name` where that is a text, as of a foreign rule;
    else its class's name.
    """
    name = getattr(part, "name", None)
    return name if isinstance(name, str) else type(part).__name__


def find_faults(
    emitted: np.ndarray,
    drafted: np.ndarray,
    num_accepted: np.ndarray,
    num_valid: np.ndarray,
    num_drafted: np.ndarray,
    vocab_size: int,
    *,
    tree: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """What is wrong with the rows of a step, as drafter and sampler returned them: `[B]` sums of
    `Fault` values, 0 for a sound row.

    Args:
        emitted: `[B, D + 1]` tokens of the verdict.
        drafted: `[B, K]` tokens of the draft.
        num_accepted, num_valid, num_drafted: `[B]` of verdict, draft and verdict.
        vocab_size: V.
        tree: `[B, D + 1]` path of the verdict, and `[B, K]` parents of the draft. Of chains they
            are known, and nothing is looked up: this runs once in every step.
    """
    width, depth = drafted.shape[1], emitted.shape[1] - 1
    index = np.arange(max(width, depth) + 1)
    is_accepted = index[:depth] < num_accepted[:, None]
    is_emitted = index[: depth + 1] <= num_accepted[:, None].clip(min=0)
    is_drafted = index[:width] < num_valid[:, None]
    found = {
        Fault.NUM_VALID: (num_valid < 0) | (num_valid > width),
        Fault.NUM_ACCEPTED: (num_accepted < 0) | (num_accepted > num_valid),
        Fault.NUM_DRAFTED: (num_drafted < num_accepted) | (num_drafted > num_valid),
        Fault.DRAFT_ID: (is_drafted & ((drafted < 0) | (drafted >= vocab_size))).any(axis=1),
        Fault.EMITTED_ID: (is_emitted & ((emitted < 0) | (emitted >= vocab_size))).any(axis=1),
    }
    along, is_off = drafted, False
    if tree is not None and width:
        path, parents = tree
        nodes = (path[:, 1:] - 1).clip(0, width - 1)
        along = np.take_along_axis(drafted, nodes, axis=1)
        is_late = (parents < -1) | (parents >= index[:width])
        found[Fault.PARENT] = (is_drafted & is_late).any(axis=1)
        follows = np.take_along_axis(parents, nodes, axis=1) + 1 == path[:, :-1]
        is_off = ~follows | (path[:, 1:] < 1) | (path[:, 1:] > num_valid[:, None])
        found[Fault.NUM_ACCEPTED] |= num_accepted > depth
    is_off = is_off | (emitted[:, :depth] != along)
    found[Fault.ACCEPTED_TOKEN] = (is_accepted & is_off).any(axis=1)
    return np.stack(list(found.values()), axis=1) @ np.array(list(found), dtype=np.int64)


def check_decisions(sampler: object, verdict: Verdict, draft: Draft, vocab_size: int) -> None:
    """Raises `ValueError` for the first row of a verdict that breaks its contract; waits for the
    device.
    """
    num_valid = torch.full_like(verdict.num_accepted, draft.tokens.shape[1])
    num_valid = num_valid if draft.num_valid is None else draft.num_valid
    num_drafted = num_valid if verdict.num_drafted is None else verdict.num_drafted
    tensors = verdict.tokens, draft.tokens, verdict.num_accepted, num_valid, num_drafted
    emitted, drafted, *counts = (tensor.cpu().numpy() for tensor in tensors)
    tree = None if draft.is_chain else (verdict.path.cpu().numpy(), draft.parents.cpu().numpy())
    faults = find_faults(emitted, drafted, *counts, vocab_size, tree=tree)
    for row in faults.nonzero()[0][:1].tolist():
        raise ValueError(
            f"in row {row} {fault_text(int(faults[row]), None, sampler)} (drafted "
            f"{drafted[row].tolist()}, {counts[0][row]} accepted, emitted {emitted[row].tolist()})"
        )


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
        logprobs: `[B, 2, D + 1]` float32 of the emitted tokens, where the call asked for them: as
            they were drawn, and by the softmax of the target's logits before processors.
        num_sound: `[B]` of the kept tokens, those before one that no distribution stands for
            (`until_empty`); `None` for all of them.
        raw_logits: `[B, K + 1, V]` of the target, where processors made `logits` of them.
    """

    draft: Draft
    verdict: Verdict
    logits: Tensor
    num_new: Tensor
    is_eos: Tensor
    vocab_size: int
    logprobs: Tensor | None = None
    num_sound: Tensor | None = None
    raw_logits: Tensor | None = None

    def until_empty(self, is_empty: Tensor) -> Outcome:
        """The outcome whose sound tokens are those up to the first one that comes from a row of the
        window where no token was possible, `[B, K + 1]` bool.
        """
        index = torch.arange(self.draft.depth + 1, device=is_empty.device)
        is_empty = is_empty.gather(1, self.verdict.path.clamp(0, is_empty.shape[1] - 1))
        first = torch.where(is_empty, index, len(index)).amin(dim=1)
        return replace(self, num_sound=torch.minimum(self.num_new, first))

    def of_rows(self, count: int) -> Outcome:
        """The outcome of the first rows."""
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
            "faults": verdict.faults,
            "emitted": verdict.tokens,
            "drafted": proposed.tokens,
        }
        if not proposed.is_chain:
            columns |= {"path": verdict.path, "parents": proposed.parents}
        columns = {name: column for name, column in columns.items() if column is not None}
        columns = {name: c[:, None] if c.dim() == 1 else c for name, c in columns.items()}
        widths = {name: column.shape[1] for name, column in columns.items()}
        table = Transfer(torch.cat([*columns.values()], dim=1))
        logprobs = None if self.logprobs is None else Transfer(self.logprobs)
        return PendingOutcome(table, widths, self.vocab_size, logprobs)


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
    """An outcome on its way to the host: one table, whose columns have names and widths."""

    table: Transfer
    widths: dict[str, int]
    vocab_size: int
    logprobs: Transfer | None = None

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """`[B]` counts and `[B, width]` tokens by name, counts that nobody gave included; this is
        where the host waits for the device.
        """
        table, given, end = self.table.wait().numpy(), {}, 0
        for name, width in self.widths.items():
            start, end = end, end + width
            given[name] = table[:, start:end] if name in _TABLES else table[:, start]
        everything = np.full(len(table), self.widths["drafted"])
        usual = {"num_valid": everything, "num_drafted": given.get("num_valid", everything)}
        usual |= {"faults": 0 * everything, "num_sound": given["num_new"]}
        return usual | given

    def read(self) -> list[RowStep]:
        """What the step did, row by row."""
        told = dict(self.columns)
        tree = (told["path"], told["parents"]) if "path" in told else None
        counts = (told[name] for name in ("num_accepted", "num_valid", "num_drafted"))
        tokens = told["emitted"], told["drafted"]
        faults = told["faults"] | find_faults(*tokens, *counts, self.vocab_size, tree=tree)
        is_empty = told["num_sound"] < told["num_new"]
        told["num_sound"] = np.where(faults > 0, 0, told["num_sound"])
        told["faults"] = faults | int(Fault.TARGET_LOGITS) * is_empty
        rows = {name: column.tolist() for name, column in told.items()}
        if self.logprobs is not None:
            rows["logprobs"] = self.logprobs.wait().tolist()
        columns = zip(*rows.values(), strict=True)
        return [_row_step(dict(zip(rows, row, strict=True))) for row in columns]


_TABLES = "emitted", "drafted", "path", "parents"
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
    if "logprobs" in row:
        own = (values[:new] for values in row["logprobs"])
        others |= zip(("logprobs", "raw_logprobs"), own, strict=True)
    return RowStep(row["drafted"][:valid], accepted, row["emitted"][:new], **others)
