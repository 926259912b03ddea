"""The loop as a drafter sees it, over plain Python lists: committed text becomes contexts."""

import torch

from specdec.graphs.tree import parts_of
from specdec.slots.cache import SlotCache, narrowed
from specdec.types import Context


class PlainLoop:
    """Rows of committed tokens; what the last step committed is what the next context brings.

    Args:
        prompts: tokens per row, at least one each.
        num_draft_tokens: K.
        depth: D, which gives contexts their width; K for a chain.
        garbage: fills every place of a context that belongs to no row; a drafter must not care.
        slack: how far the host's bound of the longest row is above the truth.
    """

    def __init__(self, prompts, num_draft_tokens, *, depth=None, garbage=-1, slack=0):
        self.rows = [list(prompt) for prompt in prompts]
        self.num_draft_tokens = num_draft_tokens
        self.width = (depth or num_draft_tokens) + 1
        self.garbage, self.slack = garbage, slack
        self.num_new = [min(len(row) - 1, 1) for row in self.rows]

    @property
    def num_in_use(self):
        """The host's bound of the slots that a step may use."""
        return max(map(len, self.rows)) + self.num_draft_tokens + self.slack

    def narrowed(self, state, num_in_use=None):
        """The caches of a drafter's state attend over no more than the loop lets them."""
        count = self.num_in_use if num_in_use is None else num_in_use
        return narrowed(parts_of(state, SlotCache), count)

    def _window(self, starts, width):
        """Tokens of `starts[b] + 0..width` of each row; garbage behind a row's end."""
        window = torch.full((len(self.rows), width + 1), self.garbage)
        for b, (row, start) in enumerate(zip(self.rows, starts, strict=True)):
            piece = row[start : start + width + 1]
            window[b, : len(piece)] = torch.tensor(piece, dtype=torch.long)
        return window

    def prefill(self, drafter, state, chunk_size):
        """Shows the prompts but their last token, chunk by chunk."""
        longest = max(map(len, self.rows)) - 1
        for offset in range(0, longest, chunk_size):
            end = min(offset + chunk_size, longest)
            num_new = [min(max(len(row) - 2 - offset, -1), end - offset) for row in self.rows]
            starts = [offset] * len(self.rows)
            window = self._window(starts, end - offset)
            for row, count in enumerate(num_new):
                window[row, max(count, -1) + 1 :] = self.garbage
            context = Context(window, None, torch.tensor(starts), torch.tensor(num_new))
            with self.narrowed(state, end + 1):
                drafter.prefill(context, state)

    def context(self):
        """What the next proposal gets."""
        starts = [len(row) - 1 - new for row, new in zip(self.rows, self.num_new, strict=True)]
        window = self._window(starts, self.width)
        num_new = torch.tensor(self.num_new)
        return Context(window, None, torch.tensor(starts), num_new)

    def context_from_scratch(self):
        """The same text as one context that starts at position 0."""
        starts = [0] * len(self.rows)
        window = self._window(starts, max(map(len, self.rows)) - 1)
        num_new = torch.tensor([len(row) - 1 for row in self.rows])
        return Context(window, None, torch.tensor(starts), num_new)

    def commit(self, new):
        """Appends new tokens to each row."""
        for row, tokens in zip(self.rows, new, strict=True):
            assert len(tokens) <= self.width
            row += tokens
        self.num_new = [len(tokens) for tokens in new]
