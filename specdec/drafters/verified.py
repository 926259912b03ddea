"""What became of a draft, for drafters that ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from specdec.types import Draft, TargetOutput, Verdict


@dataclass(frozen=True, eq=False)
class Verified:
    """What became of a draft, for drafters that ask (`Drafter.reads_outcome`). Of rows that had
    ended before, `num_new` is 0 and the rest is garbage.

    Args:
        draft: that was verified.
        output: `logits` `[B, N, V]` of all rows of the window, those after rejected tokens and
            after tokens at or beyond `num_valid` included, before the call's logits processors;
            and `features` `[B, N, F]` of the drafter's layers, or `None`.
        verdict: what the sampler decided, with ids and counts in their ranges.
        num_new: `[B]` int64, tokens that each row kept: fewer than were emitted where the row ended
            among them.
        root: `[B]` int64, the last token before the draft, whose row of the window is 0.

    Example:
        >>> import torch
        >>> from specdec.types import PAD_TOKEN
        >>> draft = Draft(torch.tensor([[5, 6, 7]]))
        >>> verdict = Verdict(torch.tensor([[5, 9, PAD_TOKEN, PAD_TOKEN]]), torch.tensor([1]))
        >>> output = TargetOutput(torch.zeros(1, 4, 10))
        >>> verified = Verified(draft, output, verdict, torch.tensor([2]), torch.tensor([4]))
        >>> verified.extra, verified.end, verified.is_rejected
        (tensor([9]), tensor([1]), tensor([[False,  True, False]]))
    """

    draft: Draft
    output: TargetOutput
    verdict: Verdict
    num_new: Tensor
    root: Tensor

    @cached_property
    def extra(self) -> Tensor:
        """`[B]`, the recovered or bonus token, which the sampler drew after the accepted ones."""
        return self.verdict.tokens.gather(1, self.verdict.num_accepted[:, None])[:, 0]

    @cached_property
    def end(self) -> Tensor:
        """`[B]`, the row of the window where the accepted path ends, 0 for the root: the row whose
        logits the extra token follows.
        """
        return self.verdict.rows.gather(1, self.verdict.num_accepted[:, None])[:, 0]

    @cached_property
    def is_rejected(self) -> Tensor:
        """`[B, K]` bool, the draft tokens that were rejected: those that follow the end of the
        accepted path. Tokens after them were not up for decision.
        """
        return (self.draft.window_parents == self.end[:, None]) & self.draft.is_valid
