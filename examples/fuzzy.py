"""Fuzzy acceptance (Holsman et al., arXiv:2502.20704): a draft token is also kept where draft and
target are near each other in total variation. Lossy; at a threshold of 0 it is the rejection rule.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec import Draft, LogitsFilter, Sampler, StepNoise, Stream, Verdict
from specdec.kernels import append_token, draw


class FuzzySampler(Sampler):
    """Keeps a draft token x if TV(p, q) is at most `threshold`, or else with probability
    min(1, p(x) / q(x)); what takes the place of a rejected one comes from max(0, p - q).

    Args:
        threshold: T of the paper, in [0, 1).

    Example:
        >>> FuzzySampler(0.0).lossless, FuzzySampler(0.2).lossless
        (True, False)
    """

    def __init__(self, threshold: float):
        super().__init__()
        self.threshold, self.lossless = threshold, threshold == 0

    def accept(
        self, draft: Draft, target_logits: Tensor, logits_filter: LogitsFilter, noise: StepNoise
    ) -> Verdict:
        """The rule over chains."""
        target = logits_filter(target_logits)  # [B, K + 1, V]
        count, is_valid = draft.tokens.shape[1], draft.is_valid
        probs = draft.probs_like(target).where(is_valid[..., None], 0.0)
        of_draft, of_target = (
            table[:, :count].gather(2, draft.tokens.clamp(min=0)[..., None])[..., 0]
            for table in (probs, target)
        )
        is_kept = noise.uniform(Stream.ACCEPT)[:, :count] * of_draft < of_target
        if self.threshold:
            distance = (target[:, :count] - probs).abs().sum(dim=-1) / 2
            is_kept = is_kept | (distance <= self.threshold)
        num_accepted = (is_kept & is_valid).long().cumprod(dim=1).sum(dim=1)
        at = torch.arange(len(target), device=target.device), num_accepted
        p, q = target[at], F.pad(probs, (0, 0, 0, 1))[at]
        residual = (p - q).clamp(min=0)
        residual = torch.where(residual.sum(dim=1, keepdim=True) > 0, residual, p)
        extra = draw(residual, noise.uniform(Stream.RESAMPLE)[:, 0])
        return Verdict(
            append_token(draft.tokens, num_accepted, extra), num_accepted, draft.num_valid
        )
