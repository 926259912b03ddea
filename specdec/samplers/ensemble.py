"""`EnsembleSampler`: samples from a mixture of target and draft. Lossy, with a bound."""

import torch
from torch import Tensor

from specdec.arguments import check_number
from specdec.kernels import find_faults, token_rule
from specdec.samplers.base import Sampler, rule_uniforms
from specdec.samplers.noise import StepNoise
from specdec.samplers.warp import Warp
from specdec.types import Draft, Verdict


class EnsembleSampler(Sampler):
    """Samples exactly from w p + (1 - w) q at every drafted index, so that more is accepted. This
    does not keep the target's distribution p.

    It is the rejection rule with the mixture in place of the target. Where the draft is a draw from
    q, the distribution of each output token, given the tokens before it, is off by exactly
    (1 - w) TV(q, p), thus TV <= 1 - w; K tokens together by at most the sum. A point-mass draft
    counts as its one-hot distribution. The bonus token and greedy rows are exact.

    Args:
        target_weight: w in 0..1; 1 is `RejectionSampler`.

    Example:
        >>> EnsembleSampler(target_weight=0.9).lossless
        False

    Reference: Fu et al., "Speculative Ensemble", arXiv:2502.01662: the distribution to verify
    against can be a mixture of target and draft.
    """

    lossless = False

    def __init__(self, target_weight: float):
        super().__init__()
        self.target_weight = check_number("target_weight", target_weight, 0, 1)

    def extra_repr(self) -> str:
        """Its weight."""
        return f"target_weight={self.target_weight}"

    def accept(self, draft: Draft, target_logits: Tensor, warp: Warp, noise: StepNoise) -> Verdict:
        """Token by token, against the mixture."""
        probs, w = warp(target_logits), self.target_weight
        mixed = probs.clone()
        if draft.probs is None:
            token = draft.tokens.clamp(min=0)[..., None]
            of_draft = torch.zeros_like(probs[:, :-1]).scatter_(-1, token, 1.0)
        else:
            of_draft = draft.probs
        mixed[:, :-1] = w * probs[:, :-1] + (1 - w) * of_draft
        if warp.greedy_rows is not None:
            mixed = torch.where(warp.greedy_rows[:, None, None], probs, mixed)
        if draft.num_valid is not None:  # the extra token of a short row is the target's alone
            index = torch.arange(draft.tokens.shape[1] + 1, device=probs.device)
            is_drafted = (index < draft.num_valid[:, None])[..., None]
            mixed = torch.where(is_drafted, mixed, probs)
        tokens, num_accepted = token_rule(draft, mixed, rule_uniforms(draft, noise))
        faults = find_faults(draft, target_logits.amax(dim=-1), num_accepted)
        return Verdict(tokens, num_accepted, draft.num_valid, faults)
