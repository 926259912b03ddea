"""Gumbel-max list coupling (GLS; Rowan, Phan, Khisti, arXiv:2506.05632): a rule of one's own, with
numbers of its own, and its faults.

Each of P paths is drawn by a race of its own. The target's token is the first that arrives in any
of the races of those paths that agree with the text so far.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec import Draft, LogitsFilter, StepNoise, Verdict
from specdec.kernels.race.reference import first_arrival
from specdec.kernels.verify.paths import PathDraft
from specdec.kernels.verify.verdict import verify_points
from specdec.samplers.paths import PathSampler


def draw_by_lists(logits, logits_filter, noise, index, *, wants_probs, out=None):
    """Each path by its own race."""
    if logits_filter.is_greedy:
        return logits.argmax(dim=-1), None
    return noise.race(logits, logits_filter, index, path=noise.path), None


class ListSampler(PathSampler):
    """GLS; of a chain it is `CouplingSampler`."""

    uses_draft_probs = uses_accept_draws = False
    draw_draft = staticmethod(draw_by_lists)

    def accept(
        self, draft: Draft, target_logits: Tensor, logits_filter: LogitsFilter, noise: StepNoise
    ) -> Verdict:
        """The first arrival of all races in use."""
        in_use, depths = self.lists_in_use(draft), self.depths(draft)  # [B, N, P], [B, N]
        noise = noise.at_depths(depths)
        arrivals = [
            noise.arrivals(target_logits, 0, path=k).masked_fill(~own[..., None], torch.inf)
            for k, own in enumerate(in_use.unbind(dim=2))
        ]
        first = torch.stack(arrivals).amin(dim=0)
        return verify_points(draft, first_arrival(logits_filter(target_logits), first))

    def depths(self, draft: Draft) -> Tensor:
        """Of the rows of the window."""
        return draft.depths

    def lists_in_use(self, draft: Draft) -> Tensor:
        """`[B, N, P]` bool: the paths that agree with each row of the window; of a tree that is no
        set of paths the first alone.
        """
        rows, width = draft.tokens.shape
        count = draft.num_paths if isinstance(draft, PathDraft) else 1
        if count == 1:
            return draft.tokens.new_ones(rows, width + 1, 1, dtype=torch.bool)
        tokens = draft.tokens.where(draft.is_valid, -1)
        tokens = F.pad(tokens, (0, -width % count), value=-1).unflatten(1, (-1, count))
        is_alike = (tokens[..., None] == tokens[:, :, None]) & (tokens[..., None] >= 0)
        agree = is_alike.long().cumprod(dim=1) > 0  # [B, D, P, P]
        return F.pad(agree.flatten(1, 2)[:, :width], (0, 0, 1, 0), value=True)


class OneRaceForAllDepths(ListSampler):
    """The fault: the same numbers at every depth."""

    def depths(self, draft: Draft) -> Tensor:
        return draft.depths * 0


class OfTheDraftItself(ListSampler):
    """The fault: a path's race is in use where its *next* token agrees, too."""

    def lists_in_use(self, draft: Draft) -> Tensor:
        in_use = super().lists_in_use(draft)
        if in_use.shape[2] == 1:
            return in_use
        later = torch.cat([in_use[:, in_use.shape[2] :], in_use], dim=1)[:, : in_use.shape[1]]
        both = in_use & later
        return torch.where(both.any(dim=2, keepdim=True), both, in_use)


class DrawsAhead(ListSampler):
    """The fault: draft tokens are drawn by the next position's races."""

    @staticmethod
    def draw_draft(logits, logits_filter, noise, index, *, wants_probs, out=None):
        path, depth = noise.path, index + 1
        if isinstance(path, Tensor):
            depth = index // len(path) + 1
        noise = noise.at_depths(depth, path)
        return draw_by_lists(logits, logits_filter, noise, index, wants_probs=wants_probs)
