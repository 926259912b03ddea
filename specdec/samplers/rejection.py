"""`RejectionSampler`: token-wise speculative sampling."""

from torch import Tensor

from specdec.samplers.base import Sampler, judge
from specdec.samplers.logits_filter import LogitsFilter
from specdec.samplers.noise import StepNoise
from specdec.types import Draft, Verdict


class RejectionSampler(Sampler):
    """Accepts draft tokens one by one and replaces the first rejected one, so that the output has
    the target's distribution.

    With target probabilities p, draft probabilities q and token x drawn from q: accept x with
    probability min(1, p(x) / q(x)), otherwise draw from the normalised max(0, p - q). The same
    formula covers point-mass drafts, the bonus token and greedy rows.

    Reference: Leviathan et al., arXiv:2211.17192, Alg. 1 (their p is our target, q our draft); Chen
    et al., arXiv:2302.01318, Alg. 2 (letters the other way round).

    Example:
        >>> import torch
        >>> from specdec.samplers import Noise, RejectionSampler, LogitsFilter
        >>> from specdec.types import Draft
        >>> logits = torch.tensor([[[0.0, 9.0, 0.0], [9.0, 0.0, 0.0]]])  # B = 1, K = 1, V = 3
        >>> noise = Noise([0]).at(torch.tensor([4]), width=2)
        >>> draft, greedy = Draft(torch.tensor([[1]])), LogitsFilter(1, temperature=0)
        >>> verdict = RejectionSampler()(draft, logits, greedy, noise)
        >>> verdict.tokens, verdict.num_accepted
        (tensor([[1, 0]]), tensor([1]))
    """

    lossless = True
    takes_trees = True

    def accept(
        self, draft: Draft, target_logits: Tensor, logits_filter: LogitsFilter, noise: StepNoise
    ) -> Verdict:
        """Token by token."""
        return judge(draft, target_logits, logits_filter, noise, by_block=False)
