"""The bookkeeping of a step in plain Python, for few rows in the host's own memory.

A dozen tiny operations behind a forward find their code fallen out of the processor's caches and
take 3 to 5 us each there; a loop over Python numbers, which the interpreter has at hand anyway,
does their work in the time of two of them.

Legend: B rows, K draft tokens.
"""

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from specdec.kernels.books import Books

MAX_ROWS = 16
"""For more rows tensor operations are the faster."""


def is_at_hand(tensor: Tensor) -> bool:
    """Whether values of a tensor `[B, ...]` may be looked at here.

    Not on another device, nor under a torch function mode: whoever watches operations (such as
    `no_host_sync`) is to see those that a GPU would run.
    """
    return tensor.is_cpu and tensor.shape[0] <= MAX_ROWS and not has_torch_function((tensor,))


class HostBooks(Books):
    """`Books` in the host's own memory."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # Numbers from row 0 on, which are still those of the tables when `keep` leaves fewer rows.
        self._text, self._recent = _memory_of(self.text), _memory_of(self.recent)
        self._lengths, self._anchor = _memory_of(self.lengths), _memory_of(self.anchor)
        self._start, self._num_new = _memory_of(self.start), _memory_of(self.num_new)
        self._remaining = _memory_of(self.remaining)

    def commit(self, tokens: Tensor, num_accepted: Tensor) -> Tensor:
        """As `Books.commit`."""
        if not is_at_hand(tokens):
            return super().commit(tokens, num_accepted)
        blocks = zip(tokens.tolist(), num_accepted.tolist(), strict=True)
        return torch.tensor([self._commit(row, *block) for row, block in enumerate(blocks)])

    def _commit(self, row: int, tokens: list[int], num_accepted: int) -> bool:
        """Commits a row's tokens, and says whether it ended with an end-of-sequence token."""
        num_kept = min(num_accepted + 1, self._remaining[row])
        first_end = next((i for i, token in enumerate(tokens) if token in self._end_ids), num_kept)
        num_new, length = min(num_kept, first_end + 1), self._lengths[row]
        window, place = row * self.recent.shape[1], row * self.text.shape[1] + length
        self._recent[window] = self._text[place]
        for i, token in enumerate(tokens, start=1):
            self._recent[window + i] = self._text[place + i] = token
        self._start[row], self._num_new[row], self._lengths[row] = length, num_new, length + num_new
        self._anchor[row] = self._text[place + num_new]
        is_eos = first_end < num_kept
        self._remaining[row] = 0 if is_eos else self._remaining[row] - num_new
        return is_eos


def _memory_of(tensor: Tensor) -> memoryview:
    """A contiguous tensor's numbers, which can be read and written without an operation."""
    return memoryview(tensor.view(-1).numpy())
