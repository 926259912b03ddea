"""`BlockSampler`: speculative sampling that accepts a prefix by one joint rule."""

from torch import Tensor

from specdec.samplers.base import Sampler, judge
from specdec.samplers.logits_filter import LogitsFilter
from specdec.samplers.noise import StepNoise
from specdec.types import Draft, Verdict


class BlockSampler(Sampler):
    """Accepts the longest prefix that a joint rule allows; of all lossless rules for one drafted
    path it accepts the most tokens.

    With P_0 = 1 and P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)) over target probabilities p, draft
    probabilities q and draft tokens x, prefix i < K is accepted with probability
    m_i / (m_i + 1 - P_i), where m_i = sum_x max(0, P_i p_{i+1}(x) - q_{i+1}(x)), and the whole
    draft with P_K. The longest accepted prefix n is kept, and the extra token is drawn from the
    normalised max(0, P_n p_{n+1} - q_{n+1}), after the whole draft from p_{K+1}. Where a draft is a
    point mass no rule accepts more than the token-wise one, and this is that one.

    Reference: Sun et al., arXiv:2403.10444, Alg. 2 (their M_b is our target, M_s our draft, gamma
    our K, tau our number accepted).

    Example:
        >>> import torch
        >>> from specdec.samplers import BlockSampler, Noise, RejectionSampler, LogitsFilter
        >>> from specdec.types import Draft
        >>> p, q = torch.tensor([1 / 3, 2 / 3]), torch.tensor([2 / 3, 1 / 3])  # the paper's
        >>> logits, rows = p.log().expand(60000, 3, 2), torch.arange(60000)
        >>> tokens = torch.stack([rows % 3 // 2, rows // 3 % 3 // 2], dim=1)  # as often as q says
        >>> draft, noise = Draft(tokens, q.expand(60000, 2, 2)), Noise(rows.tolist()).at(rows, 3)
        >>> for sampler in (RejectionSampler(), BlockSampler()):
        ...     verdict = sampler(draft, logits, LogitsFilter(60000), noise)
        ...     mean = verdict.num_accepted.double().mean()
        ...     print(f"{9 * mean:.1f} / 9")
        10.0 / 9
        11.0 / 9
    """

    lossless = True
    takes_trees = True

    def accept(
        self, draft: Draft, target_logits: Tensor, logits_filter: LogitsFilter, noise: StepNoise
    ) -> Verdict:
        """The draft as a whole."""
        return judge(draft, target_logits, logits_filter, noise, by_block=True)
