"""`Books`: what every row of a batch has committed, and what a step adds to it.

Legend: B rows, K draft tokens, V vocabulary, S tokens that a row has room for.
"""

import copy
from typing import Self

import torch
from torch import Tensor

from specdec.types import keep_rows

_BY_ROW = ("text", "lengths", "anchor", "remaining", "recent", "start", "num_new")


class Books:
    """The books of a batch, int64 tensors that are allocated once and updated in place.

    Args:
        text: `[B, S]` the prompts; room for what is committed behind them, and for K + 1 more.
        lengths: `[B]`, filled in later: position of each row's last committed token, the anchor.
        positions: `[B]` of the anchors before the first step.
        room: tokens that each row may commit.
        ends: token ids that end a row.
        width: K + 1, tokens that a step may emit.
        vocab_size: V.

    Attributes:
        text: `[B, S]` committed tokens; what lies behind a row's anchor is garbage.
        lengths: `[B]` position of the anchor.
        anchor: `[B]` the last committed token.
        remaining: `[B]` tokens that each row may still commit; 0 for rows that have ended.
        recent: `[B, K + 2]` the anchor of the last step and what its sampler emitted.
        start: `[B]` position of that anchor.
        num_new: `[B]` tokens that the last step committed.
    """

    def __init__(
        self,
        text: Tensor,
        lengths: Tensor,
        positions: Tensor,
        *,
        room: int,
        ends: tuple[int, ...],
        width: int,
        vocab_size: int,
    ):
        device = text.device
        self.text = text
        self.lengths = lengths
        self.anchor = text.gather(1, positions[:, None])[:, 0]
        self.remaining = torch.full_like(lengths, room)
        self.num_new = positions.clamp(max=1)  # the last token of a prompt is new to the drafter
        self.start = positions - self.num_new
        self._window = torch.arange(width + 1, device=device)
        self.recent = text.gather(1, self.start[:, None] + self._window)
        self._end_ids = frozenset(token for token in ends if 0 <= token < vocab_size)
        # 0 for tokens that end a row and K + 1 for all others, PAD_TOKEN (the last entry) included.
        self._end_table = torch.full((vocab_size + 1,), width, device=device)
        self._end_table[list(self._end_ids)] = 0

    def keep(self, rows: list[int]) -> Self:
        """The books of the given rows, in the storage of these, which must not be used any more;
        see `keep_rows`.
        """
        kept = copy.copy(self)
        for name in _BY_ROW:
            setattr(kept, name, keep_rows(getattr(self, name), rows))
        return kept

    def commit(self, tokens: Tensor, num_accepted: Tensor) -> Tensor:
        """Appends what a sampler emitted, cut where the row ends.

        Args:
            tokens: `[B, K + 1]` emitted tokens, padded with `PAD_TOKEN`.
            num_accepted: `[B]`, one less than were emitted.

        Returns:
            `[B]` bool: the row ended with an end-of-sequence token in this step.
        """
        places = self._window[:-1]
        first_end = (self._end_table.take(tokens) + places).amin(dim=1)  # [B]
        num_kept = torch.minimum(num_accepted + 1, self.remaining)
        is_eos = first_end < num_kept
        window = self.lengths[:, None] + self._window  # [B, K + 2]
        self.text.scatter_(1, window[:, 1:], tokens)
        torch.gather(self.text, 1, window, out=self.recent)
        torch.minimum(num_kept, first_end + 1, out=self.num_new)
        self.start.copy_(self.lengths)
        self.lengths += self.num_new
        torch.gather(self.text, 1, self.lengths[:, None], out=self.anchor[:, None])
        self.remaining -= self.num_new
        self.remaining.masked_fill_(is_eos, 0)
        return is_eos
