"""`TypicalSampler` and `EnsembleSampler`: rules that accept more than the target's distribution
allows, each with what it is off by.
"""

import torch
from torch import Tensor

from specdec.arguments import check_number
from specdec.kernels import draw
from specdec.kernels.verify.reference import take_rows
from specdec.kernels.verify.tree import longest_path, verdict_of
from specdec.kernels.verify.verdict import verify_probs
from specdec.samplers.base import Sampler, rule_uniforms
from specdec.samplers.logits_filter import LogitsFilter
from specdec.samplers.noise import StepNoise
from specdec.types import Draft, Verdict


class TypicalSampler(Sampler):
    """Accepts draft tokens that are likely enough for the target's uncertainty. This does not keep
    the target's distribution.

    Draft token x is accepted iff p(x) > min(epsilon, delta exp(-H(p))) or p(x) = 1, where p are the
    target's probabilities after temperature and truncation and H is their entropy in nats; the
    extra token is drawn from p. Of a tree the longest path of accepted nodes is kept. Greedy rows
    are exact: p is one-hot there, so just the target's token is accepted.

    For a draft drawn from q, let A be the probability that a token of q is accepted, and q' the
    distribution q restricted to the accepted tokens. The distribution of each output token is off
    by exactly A TV(q', p), thus at most A.

    Args:
        epsilon: probability from which a token is always accepted, in 0..1.
        delta: scales the threshold that depends on the entropy, >= 0.

    Example:
        >>> TypicalSampler(epsilon=0.1).lossless
        False

    Reference: Cai et al. (Medusa), arXiv:2401.10774, "typical acceptance".
    """

    lossless = False
    takes_trees = True
    uses_accept_draws = False

    def __init__(self, epsilon: float = 0.3, delta: float = 0.09):
        super().__init__()
        self.epsilon = check_number("epsilon", epsilon, 0, 1)
        self.delta = check_number("delta", delta, 0)

    def extra_repr(self) -> str:
        """Its thresholds."""
        return f"epsilon={self.epsilon}, delta={self.delta}"

    def accept(
        self, draft: Draft, target_logits: Tensor, logits_filter: LogitsFilter, noise: StepNoise
    ) -> Verdict:
        """By the target's probabilities alone."""
        probs = logits_filter(target_logits)  # [B, K + 1, V]
        entropy = -torch.special.xlogy(probs, probs).sum(dim=-1)
        threshold = (self.delta * (-entropy).exp()).clamp(max=self.epsilon)
        rows, vocab_size = draft.window_parents, probs.shape[-1]
        of_draft = probs.flatten(1).gather(1, rows * vocab_size + draft.tokens.clamp(min=0))
        is_accepted = (of_draft > threshold.gather(1, rows)) | (of_draft == 1)
        path = longest_path(draft, is_accepted)
        extra = draw(take_rows(probs, path.end)[:, 0], rule_uniforms(draft, noise).resample)
        return verdict_of(draft, path, extra)


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

    def accept(
        self, draft: Draft, target_logits: Tensor, logits_filter: LogitsFilter, noise: StepNoise
    ) -> Verdict:
        """Token by token, against the mixture."""
        probs, w = logits_filter(target_logits), self.target_weight
        of_draft = draft.probs_like(probs)
        first, is_drafted = draft.first_children
        mixed = take_rows(of_draft, first) * (1 - w) + w * probs if of_draft.shape[1] else probs
        # Where nothing was drafted the token is the target's alone.
        mixed = torch.where(is_drafted[..., None], mixed, probs)
        return verify_probs(draft, mixed, rule_uniforms(draft, noise), by_block=False)
