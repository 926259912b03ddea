"""What a step did: on the device, on its way to the host, and as plain Python values.

On the device, what breaks the contract of a drafter or a sampler is brought into a form that cannot
harm the step (see `step.propose` and `step.commit`). The record of the step keeps ids and counts as
they were returned, and `find_faults` looks at them on the host, before any token of the step is
emitted.

Legend: B rows, K draft tokens (nodes of a tree), D tokens of its longest path (K for a chain), V
vocabulary, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.graphs.tree import map_tensors
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


_NUM_COUNTS = 6


@dataclass(eq=False, repr=False)
class Record:
    """Named views of a table, on the device or on the host: what is written to the one or read from
    the other has a name and no column.

    Args:
        table: `[B, C]` int64, a tensor, or an array of the host.
        num_draft_tokens: K.
        tree_depth: D of trees; `None` for chains.

    Attributes:
        num_new: `[B]` tokens that the row keeps.
        is_eos: `[B]` 1 where the row ended with an end-of-sequence token.
        num_accepted, num_drafted: `[B]` tokens accepted, and those that the sampler considered.
        faults: `[B]` sums of `Fault` values that the sampler found.
        num_sound: `[B]` tokens before one that no distribution stands for (`Outcome.note_empty`).
        emitted: `[B, D + 1]` tokens, as the sampler returned them.
        path: `[B, D + 1]` of the verdict on a tree; `[B, 0]` for chains, whose path is known.
        num_valid, drafted: `[B]` and `[B, K]`, as the drafter returned them.
        parents: `[B, K]` of the nodes of a tree; `[B, 0]` for chains.
        is_chain: all drafts are chains.
        verdict, proposal: all columns of the verdict and of the proposal, in the order of above.

    Example:
        >>> record = Record.allocate(2, num_draft_tokens=3)
        >>> record.drafted[1] = 7
        >>> record.table[1].tolist(), record.emitted.shape
        ([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 7, 7], torch.Size([2, 4]))
    """

    table: Any
    num_draft_tokens: int
    tree_depth: int | None = None

    @classmethod
    def allocate(
        cls,
        batch_size: int,
        num_draft_tokens: int,
        tree_depth: int | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> Record:
        """A table of zeros."""
        depth, per_node = (num_draft_tokens, 1) if tree_depth is None else (tree_depth, 2)
        width = _NUM_COUNTS + (depth + 1) * per_node + 1 + num_draft_tokens * per_node
        table = torch.zeros(batch_size, width, dtype=torch.long, device=device)
        return cls(table, num_draft_tokens, tree_depth)

    def __post_init__(self):
        table, depth = self.table, self.tree_depth
        self.is_chain = is_chain = depth is None
        width = (self.num_draft_tokens if is_chain else depth) + 1
        counts = (table[:, i] for i in range(_NUM_COUNTS))
        self.num_new, self.is_eos, self.num_accepted, self.num_drafted, *others = counts
        self.faults, self.num_sound = others
        end = _NUM_COUNTS + width
        self.emitted = table[:, _NUM_COUNTS:end]
        self.path = table[:, end : end + (0 if is_chain else width)]
        end += self.path.shape[1]
        self.verdict, self.proposal = table[:, :end], table[:, end:]
        nodes = self.proposal[:, 1:]
        self.num_valid, self.drafted = self.proposal[:, 0], nodes[:, : self.num_draft_tokens]
        self.parents = nodes[:, self.num_draft_tokens :]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one step did, still on the device.

    Args:
        draft: what was proposed, with ids and counts brought into their ranges.
        verdict: what the sampler decided.
        logits: `[B, K + 1, V]` of the target, that the verdict was drawn from. Where steps are
            replayed, all these tensors are overwritten by the next step.
        record: everything that the host needs of it. The next step writes into the same table.
        vocab_size: V.
        logprobs: `[B, 2, D + 1]` float32 of the emitted tokens, where the call asked for them: as
            they were drawn, and by the softmax of the target's logits before processors.
    """

    draft: Draft
    verdict: Verdict
    logits: Tensor
    record: Record
    vocab_size: int
    logprobs: Tensor | None = None

    @property
    def num_new(self) -> Tensor:
        """`[B]` tokens each row keeps: 0 for rows that had ended, fewer than emitted where a row
        ends inside the block.
        """
        return self.record.num_new

    @property
    def is_eos(self) -> Tensor:
        """`[B]` bool: the row ended with an end-of-sequence token in this step."""
        return self.record.is_eos != 0

    def note_empty(self, is_empty: Tensor) -> None:
        """Counts the tokens that a row keeps up to the first one that comes from a row of the
        window where no token was possible, `[B, K + 1]` bool; the record holds the count.
        """
        index = torch.arange(self.draft.depth + 1, device=is_empty.device)
        is_empty = is_empty.gather(1, self.verdict.path.clamp(0, is_empty.shape[1] - 1))
        first = torch.where(is_empty, index, len(index)).amin(dim=1)
        torch.minimum(self.num_new, first, out=self.record.num_sound)

    def of_rows(self, count: int) -> Outcome:
        """The outcome of the first rows."""
        return map_tensors(lambda table: table[:count], self)

    def fetch(self) -> PendingOutcome:
        """Starts the transfer to the host and does not wait for it.

        The copy stands in the stream between this step and the next one, so the next step may be
        issued at once: the record is overwritten after it has been copied.
        """
        logprobs = None if self.logprobs is None else Transfer(self.logprobs)
        return PendingOutcome(Transfer(self.record.table), self.record, self.vocab_size, logprobs)


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
    """An outcome on its way to the host."""

    table: Transfer
    record: Record
    vocab_size: int
    logprobs: Transfer | None = None

    def read(self) -> list[RowOutcome]:
        """The outcome as plain Python values; this is where the host waits for the device."""
        step = replace(self.record, table=self.table.wait().numpy())
        tree = None if step.is_chain else (step.path, step.parents)
        counts = step.num_accepted, step.num_valid, step.num_drafted
        found = find_faults(step.emitted, step.drafted, *counts, self.vocab_size, tree=tree)
        faults = step.faults | found
        is_empty = step.num_sound < step.num_new
        num_sound = np.where(faults > 0, 0, step.num_sound)
        faults = faults | int(Fault.TARGET_LOGITS) * is_empty
        columns = step.num_new, step.num_valid, step.num_accepted, step.is_eos, faults, num_sound
        columns += step.emitted, step.drafted, step.parents, step.path - 1
        logprobs = [None] * len(faults) if self.logprobs is None else self.logprobs.wait().tolist()
        return [
            RowOutcome(
                *(said[:new], ids[:valid], accepted, bool(ends), fault, sound, said, ids),
                *((None, None) if step.is_chain else (above[:valid], path[1 : accepted + 1])),
                own and [of_row[:new] for of_row in own],
            )
            for new, valid, accepted, ends, fault, sound, said, ids, above, path, own in zip(
                *[column.tolist() for column in columns], logprobs, strict=True
            )
        ]


class RowOutcome(NamedTuple):
    """One row of an outcome, as plain Python values; `faults` is a sum of `Fault` values,
    `num_sound` the number of new tokens before the first fault, `emitted` and `drafted` are D + 1
    and K tokens as sampler and drafter returned them. `parents` and `path` are those of a
    `RowStep`, which leaves them out for a chain. `logprobs` are both rows of `Outcome.logprobs`, of
    the new tokens.
    """

    new_tokens: list[int]
    draft_tokens: list[int]
    num_accepted: int
    is_eos: bool
    faults: int
    num_sound: int
    emitted: list[int]
    drafted: list[int]
    parents: list[int] | None = None
    path: list[int] | None = None
    logprobs: list[list[float]] | None = None
