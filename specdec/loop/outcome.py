"""What a step did: on the device, on its way to the host, and as plain Python values.

Legend: B rows, K draft tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.loop.contracts import broken_contracts
from specdec.types import Draft, Verdict

_NUM_COUNTS = 5  # columns of an outcome's record before its emitted tokens


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

    def of_rows(self, count: int) -> "Outcome":
        """The outcome of the first rows."""
        draft, verdict = self.draft, self.verdict
        return Outcome(
            Draft(draft.tokens[:count], _first(draft.probs, count), _first(draft.num_valid, count)),
            Verdict(
                verdict.tokens[:count],
                verdict.num_accepted[:count],
                _first(verdict.num_drafted, count),
                _first(verdict.faults, count),
            ),
            self.logits[:count],
            self.record[:count],
            self.vocab_size,
        )

    def fetch(self) -> "PendingOutcome":
        """Starts the transfer to the host and does not wait for it.

        The copy stands in the stream between this step and the next one, so the next step may be
        issued at once: the record is overwritten after it has been copied.
        """
        if not self.record.is_cuda:
            return PendingOutcome(self.record.clone(), self.vocab_size, None)
        pinned = torch.empty(self.record.shape, dtype=torch.long, pin_memory=True)
        pinned.copy_(self.record, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return PendingOutcome(pinned, self.vocab_size, arrived)


def _first(tensor: Tensor | None, count: int) -> Tensor | None:
    return None if tensor is None else tensor[:count]


@dataclass(frozen=True, eq=False)
class StepScores:
    """Logits of one step that the result is to hold.

    Args:
        scores: `[B, K + 1, V]` after processors, temperature and truncation, or `None`.
        logits: `[B, K + 1, V]` of the target, or `None`.
    """

    scores: Tensor | None
    logits: Tensor | None


def record_width(num_draft_tokens: int) -> int:
    """Columns of a record.

    Example:
        >>> record_width(4)
        15
    """
    return _NUM_COUNTS + 2 * (num_draft_tokens + 1)


def record_columns(num_draft_tokens: int) -> dict[str, slice]:
    """What the columns of a record hold.

    Example:
        >>> record_columns(4)["emitted tokens"]
        slice(5, 10, None)
    """
    names = "kept tokens", "ends", "accepted tokens", "numbers of considered tokens", "faults"
    columns = {name: slice(i, i + 1) for i, name in enumerate(names)}
    split = _NUM_COUNTS + num_draft_tokens + 1
    return columns | {
        "emitted tokens": slice(_NUM_COUNTS, split),
        "numbers of draft tokens": slice(split, split + 1),
        "draft tokens": slice(split + 1, split + 1 + num_draft_tokens),
    }


@dataclass(frozen=True, eq=False)
class PendingOutcome:
    """An outcome on its way to the host.

    Args:
        record: as in `Outcome`, on the host once `arrived`.
        vocab_size: V.
        arrived: of the transfer; `None` when there is nothing to wait for.
    """

    record: Tensor
    vocab_size: int
    arrived: torch.cuda.Event | None

    def read(self) -> list["RowOutcome"]:
        """The outcome as plain Python values; this is where the host waits for the device."""
        if self.arrived is not None:
            self.arrived.synchronize()
        width = (self.record.shape[1] - _NUM_COUNTS) // 2  # K + 1
        rows = []
        for row in self.record.tolist():
            num_new, is_eos, num_accepted, num_seen, faults = row[:_NUM_COUNTS]
            emitted = row[_NUM_COUNTS : _NUM_COUNTS + width]
            num_drafted, *drafted = row[_NUM_COUNTS + width :]
            counts = num_accepted, num_drafted, self.vocab_size, num_seen
            rows.append(
                RowOutcome(
                    new_tokens=emitted[:num_new],
                    draft_tokens=drafted[:num_drafted],
                    num_accepted=num_accepted,
                    is_eos=bool(is_eos),
                    faults=faults | broken_contracts(emitted, drafted, *counts),
                    emitted=emitted,
                    drafted=drafted,
                )
            )
        return rows


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
