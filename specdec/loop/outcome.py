"""What a step did: on the device, on its way to the host, and as plain Python values.

On the device, what breaks the contract of a drafter or a sampler is brought into a form that cannot
harm the step (see `step.propose` and `step.commit`). The record of the step keeps ids and counts as
they were returned, and `find_faults` looks at them on the host, before any token of the step is
emitted.

Legend: B rows, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.types import Draft, Fault, Verdict

_NUM_COUNTS = 5  # columns of a record before its emitted tokens

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
        "begin with the first num_accepted of draft.tokens"
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
    """What messages call a part: its class, or the name of a foreign rule."""
    name = getattr(part, "name", None)
    return name if isinstance(name, str) else type(part).__name__


def find_faults(
    emitted: np.ndarray,
    drafted: np.ndarray,
    num_accepted: np.ndarray,
    num_valid: np.ndarray,
    num_drafted: np.ndarray,
    vocab_size: int,
) -> np.ndarray:
    """What is wrong with the rows of a step, as drafter and sampler returned them: `[B]` sums of
    `Fault` values, 0 for a sound row.

    Args:
        emitted: `[B, K + 1]` tokens of the verdict.
        drafted: `[B, K]` tokens of the draft.
        num_accepted, num_valid, num_drafted: `[B]` of verdict, draft and verdict.
        vocab_size: V.
    """
    width = drafted.shape[1]
    index = np.arange(width + 1)
    is_accepted = index[:width] < num_accepted[:, None]
    is_emitted = index <= num_accepted[:, None].clip(min=0)
    is_drafted = index[:width] < num_valid[:, None]
    found = {
        Fault.NUM_VALID: (num_valid < 0) | (num_valid > width),
        Fault.NUM_ACCEPTED: (num_accepted < 0) | (num_accepted > num_valid),
        Fault.NUM_DRAFTED: (num_drafted < num_accepted) | (num_drafted > num_valid),
        Fault.DRAFT_ID: (is_drafted & ((drafted < 0) | (drafted >= vocab_size))).any(axis=1),
        Fault.EMITTED_ID: (is_emitted & ((emitted < 0) | (emitted >= vocab_size))).any(axis=1),
        Fault.ACCEPTED_TOKEN: (is_accepted & (emitted[:, :width] != drafted)).any(axis=1),
    }
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
    faults = find_faults(emitted, drafted, *counts, vocab_size)
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
        verdict: what the sampler decided.
        logits: `[B, K + 1, V]` of the target, that the verdict was drawn from. Where steps are
            replayed, all these tensors are overwritten by the next step.
        record: `[B, 2 K + 7]` int64, everything that the host needs of it: tokens kept, whether the
            row ended with an end-of-sequence token, tokens accepted, draft tokens that the sampler
            considered, faults that it found, K + 1 emitted tokens, number of draft tokens, and K of
            them, as sampler and drafter returned them. The next step writes into the same tensor.
        vocab_size: V.
    """

    draft: Draft
    verdict: Verdict
    logits: Tensor
    record: Tensor
    vocab_size: int

    @property
    def num_new(self) -> Tensor:
        """`[B]` tokens each row keeps: 0 for rows that had ended, fewer than emitted where a row
        ends inside the block.
        """
        return self.record[:, 0]

    @property
    def is_eos(self) -> Tensor:
        """`[B]` bool: the row ended with an end-of-sequence token in this step."""
        return self.record[:, 1] != 0

    def of_rows(self, count: int) -> Outcome:
        """The outcome of the first rows."""

        def first(record: Draft | Verdict) -> dict[str, Tensor | None]:
            fields = vars(record).items()
            return {name: None if x is None else x[:count] for name, x in fields}

        draft, verdict = Draft(**first(self.draft)), Verdict(**first(self.verdict))
        return Outcome(draft, verdict, self.logits[:count], self.record[:count], self.vocab_size)

    def fetch(self) -> PendingOutcome:
        """Starts the transfer to the host and does not wait for it.

        The copy stands in the stream between this step and the next one, so the next step may be
        issued at once: the record is overwritten after it has been copied.
        """
        return PendingOutcome(Transfer(self.record), self.vocab_size)


class Transfer:
    """A copy of a tensor on its way to the host; the tensor may be overwritten by what the device
    does next.
    """

    def __init__(self, tensor: Tensor):
        self._arrived = None
        if not tensor.is_cuda:
            self._copy = tensor.clone()
            return
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
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

    record: Transfer
    vocab_size: int

    def read(self) -> list[RowOutcome]:
        """The outcome as plain Python values; this is where the host waits for the device."""
        record = self.record.wait().numpy()
        num_new, is_eos, num_accepted, num_drafted, faults = record[:, :_NUM_COUNTS].T
        split = (record.shape[1] + _NUM_COUNTS) // 2  # emitted tokens end here
        emitted, num_valid = record[:, _NUM_COUNTS:split], record[:, split]
        drafted = record[:, split + 1 :]
        counts = num_accepted, num_valid, num_drafted
        faults = faults | find_faults(emitted, drafted, *counts, self.vocab_size)
        columns = num_new, num_valid, num_accepted, is_eos, faults, emitted, drafted
        return [
            RowOutcome(said[:new], ids[:valid], accepted, bool(ends), fault, said, ids)
            for new, valid, accepted, ends, fault, said, ids in zip(
                *[column.tolist() for column in columns], strict=True
            )
        ]


class RowOutcome(NamedTuple):
    """One row of an outcome, as plain Python values; `faults` is a sum of `Fault` values, `emitted`
    and `drafted` are K + 1 and K tokens as sampler and drafter returned them.
    """

    new_tokens: list[int]
    draft_tokens: list[int]
    num_accepted: int
    is_eos: bool
    faults: int
    emitted: list[int]
    drafted: list[int]
