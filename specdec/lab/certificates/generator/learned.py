"""Where earlier tokens leaned: directions that are learned while texts are read.

Of all tokens, observed and expected counts are kept: over everything that was read, and apart for
each context, the last two tokens. What was seen more often than expected is bet on from then on, so
that a fault is found which points to other tokens in other contexts and has no relation to draft
or likelihood.

Legend: B rows, n of them that have not ended, V vocabulary, C contexts.
"""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

_CONTEXTS = 64
"""One for each pair of tokens in tiny vocabularies, else for each last token modulo 64."""
_DOUBT = 8.0
"""Tokens that would have been as expected: few are no evidence."""
_BOLD = 4.0
"""The mean of so many times an excess, relative to p, is found with a middle stake."""


class Counts:
    """Of tokens; the tables get their width with the first of them."""

    def __init__(self):
        self._excess = self._expected = torch.zeros(
            1 + _CONTEXTS, 1, dtype=torch.float64, device="cpu"
        )

    def factors(self, last: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, V]` each, in -1..1: by how much tokens were seen more often than expected, over all
        contexts and in this one.

        Args:
            last: `[B, 2]` tokens before.
            probs: `[B, V]` of the tokens that are next.
        """
        self._excess, self._expected = (
            table.to(probs.device) for table in (self._excess, self._expected)
        )
        factors = (_BOLD * self._excess / (self._expected + _DOUBT)).clamp(-1, 1)
        factors = factors.expand(-1, probs.shape[1])
        return factors[:1].expand(len(probs), -1), factors[1 + _context(last, probs)]

    def add(self, last: Tensor, probs: Tensor, tokens: Tensor) -> None:
        """One more token `[n, 1]` of each row, drawn from `[n, V]` after `[n, 2]`."""
        # A product, since the order of other sums differs between runs on a GPU.
        where = one_hot(1 + _context(last, probs), 1 + _CONTEXTS).to(probs)
        where[:, 0] = 1.0
        observed = torch.zeros_like(probs).scatter_(1, tokens, 1.0)
        self._excess = self._excess + where.T @ (observed - probs)
        self._expected = self._expected + where.T @ probs


class Learned(Counts):
    """Of all texts of one target, and of drafts of first tokens."""

    def __init__(self):
        super().__init__()
        self.of_draft = Counts()


def _context(last: Tensor, probs: Tensor) -> Tensor:
    """`[B]` in 0..C - 1."""
    return (last[:, 0] * probs.shape[1] + last[:, 1]) % _CONTEXTS
