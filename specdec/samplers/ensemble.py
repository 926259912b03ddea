"""`EnsembleSampler`: samples from a mixture of target and draft. Lossy, with a bound."""

import torch
from torch import Tensor

from specdec.arguments import check_number
from specdec.kernels import take_rows, verify_probs
from specdec.samplers.base import Sampler, rule_uniforms
from specdec.samplers.noise import StepNoise
from specdec.samplers.warp import Warp
from specdec.types import Draft, Verdict


class EnsembleSampler(Sampler):
    """Samples exactly from w p + (1 - w) q at every drafted index, so that more is accepted. This
    does not keep the target's distribution p.

    It is the rejection rule with the mixture in place of the target; of a tree q is what the first
    child of a node was drawn from. Where the draft is a draw from q, the distribution of each
    output token, given the tokens before it, is off by exactly (1 - w) TV(q, p), thus TV <= 1 - w;
    K tokens together by at most the sum. A point-mass draft counts as its one-hot distribution. The
    bonus token and greedy rows are exact. What is asked of the target (truncation,
    `min_new_tokens`, processors, grammars) does not bind the draft's share.

    Args:
        target_weight: w in 0..1; 1 is `RejectionSampler`.

    Example:
        >>> EnsembleSampler(target_weight=0.9).lossless
        False

    Reference: Fu et al., "Speculative Ensemble", arXiv:2502.01662: the distribution to verify
    against can be a mixture of target and draft.
    """

    lossless = False
    takes_trees = True

    def __init__(self, target_weight: float):
        super().__init__()
        self.target_weight = check_number("target_weight", target_weight, 0, 1)

    def extra_repr(self) -> str:
        """Its weight."""
        return f"target_weight={self.target_weight}"

    def accept(self, draft: Draft, target_logits: Tensor, warp: Warp, noise: StepNoise) -> Verdict:
        """Token by token, against the mixture."""
        probs, w = warp(target_logits), self.target_weight
        of_draft = draft.probs_like(probs)
        first, is_drafted = draft.first_children
        mixed = take_rows(of_draft, first) * (1 - w) + w * probs if of_draft.shape[1] else probs
        if warp.greedy_rows is not None:
            is_drafted = is_drafted & ~warp.greedy_rows[:, None]
        # Where nothing was drafted the token is the target's alone.
        mixed = torch.where(is_drafted[..., None], mixed, probs)
        return verify_probs(draft, mixed, rule_uniforms(draft, noise), by_block=False)
