"""`TokenBuffer`: what every row of a batch has committed, and what a step adds to it.

Legend: B rows, K draft tokens, V vocabulary, S tokens that a row has room for.
"""

import copy
from typing import Self

import torch
from torch import Tensor

from specdec.types import PAD_TOKEN, keep_rows

_BY_ROW = ("tokens", "anchor_position", "anchor", "remaining", "recent", "start", "num_new")


class TokenBuffer:
    """The committed tokens of a batch: int64 tensors that are allocated once and updated in place.

    How far each row has come stands here and nowhere else: `load` sets the position of its anchor
    and `commit` advances it.

    Args:
        batch_size: rows B.
        num_slots: S, the longest text plus K + 1 tokens.
        num_draft_tokens: K.
        vocab_size: V.
        device: where the tensors live.

    Attributes:
        tokens: `[B, S]` committed tokens; what follows a row's anchor is garbage.
        anchor_position: `[B]`; so many tokens have been through the target.
        anchor: `[B]` the last committed token.
        remaining: `[B]` tokens that each row may still commit; 0 for rows that have ended.
        recent: `[B, K + 2]` the anchor of the last step and what its sampler emitted.
        start: `[B]` position of that anchor.
        num_new: `[B]` tokens that the last step committed.
        longest: upper bound, on the host, of the tokens that a row has committed. `commit` adds the
            most that a step can commit; a replayed graph does not (see `StepState.num_attended`).

    Example:
        >>> buffer = TokenBuffer(1, 16, num_draft_tokens=2, vocab_size=50)
        >>> buffer.load(torch.tensor([[7, 8, 9]]), [3], max_new_tokens=5, eos=())
        >>> ended = buffer.commit(torch.tensor([[20, 21, PAD_TOKEN]]), torch.tensor([1]))
        >>> buffer.anchor_position, buffer.anchor, buffer.recent
        (tensor([4]), tensor([21]), tensor([[ 9, 20, 21, -1]]))
    """

    def __init__(
        self,
        batch_size: int,
        num_slots: int,
        *,
        num_draft_tokens: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ):
        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        self.tokens = integers(batch_size, num_slots)
        self.recent = integers(batch_size, num_draft_tokens + 2)
        for name in ("anchor_position", "anchor", "remaining", "start", "num_new"):
            setattr(self, name, integers(batch_size))
        self._offsets = torch.arange(num_draft_tokens + 2, device=device)
        # 0 for tokens that end a row and K + 1 for all others, PAD_TOKEN (the last entry) included.
        self._ends = integers(vocab_size + 1)
        self.longest = self._room = 0

    def load(
        self, tokens: Tensor, lengths: list[int], *, max_new_tokens: int, eos: tuple[int, ...]
    ) -> None:
        """Starts over with new prompts. The last token of each is its anchor, and to the drafter it
        is newly committed.

        Args:
            tokens: `[B, T]` prompts from column 0 on; what follows a row's last token is ignored.
            lengths: tokens of each prompt, >= 1.
            max_new_tokens: that each row may commit.
            eos: ids that end a row.
        """
        self.tokens.fill_(PAD_TOKEN)
        self.tokens[:, : tokens.shape[1]] = tokens
        self.longest = max(lengths)
        self._room = self.longest + max_new_tokens
        self.anchor_position.copy_(torch.tensor(lengths) - 1)
        self.remaining.fill_(max_new_tokens)
        torch.clamp(self.anchor_position, max=1, out=self.num_new)
        torch.sub(self.anchor_position, self.num_new, out=self.start)
        torch.gather(self.tokens, 1, self.anchor_position[:, None], out=self.anchor[:, None])
        torch.gather(self.tokens, 1, self.start[:, None] + self._offsets, out=self.recent)
        ends = [token for token in eos if 0 <= token < len(self._ends) - 1]
        self._ends.fill_(len(self._offsets) - 1)
        self._ends[torch.tensor(ends, dtype=torch.long, device=self._ends.device)] = 0

    def keep(self, rows: list[int]) -> Self:
        """The buffer of the given rows, in the storage of this one; see `keep_rows`."""
        kept = copy.copy(self)
        for name in _BY_ROW:
            setattr(kept, name, keep_rows(getattr(self, name), rows))
        return kept

    def commit(self, tokens: Tensor, num_accepted: Tensor) -> Tensor:
        """Appends what a sampler emitted, cut where the row ends.

        Args:
            tokens: `[B, n + 1]` emitted tokens after a draft of n <= K tokens, padded with
                `PAD_TOKEN`.
            num_accepted: `[B]`, one less than were emitted.

        Returns:
            `[B]` bool: the row ended with an end-of-sequence token in this step.
        """
        width = tokens.shape[1]
        offsets = self._offsets[: width + 1]
        first_end = (self._ends.take(tokens) + offsets[:-1]).amin(dim=1)  # [B]
        num_kept = torch.minimum(num_accepted + 1, self.remaining)
        is_eos = first_end < num_kept
        self.tokens.scatter_(1, self.anchor_position[:, None] + offsets[1:], tokens)
        torch.cat([self.anchor[:, None], tokens], dim=1, out=self.recent[:, : width + 1])
        torch.minimum(num_kept, first_end + 1, out=self.num_new)
        self.start.copy_(self.anchor_position)
        self.anchor_position += self.num_new
        torch.gather(self.recent, 1, self.num_new[:, None], out=self.anchor[:, None])
        self.remaining -= self.num_new
        self.remaining.masked_fill_(is_eos, 0)
        self.note_longest(self.longest + width)
        return is_eos

    def note_longest(self, longest: int) -> None:
        """Sets the bound of the longest row, for instance from outcomes that the host has read."""
        self.longest = min(longest, self._room)
