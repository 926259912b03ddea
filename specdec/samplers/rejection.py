"""`RejectionSampler`: token-wise speculative sampling."""

from torch import Tensor, nn

from specdec.kernels.reference import verify_chain, verify_points
from specdec.samplers.noise import StepNoise, Stream
from specdec.samplers.warp import Warp
from specdec.types import Draft, Verdict


class RejectionSampler(nn.Module):
    """Accepts draft tokens one by one and repairs the first rejection, so that the output has the
    target's law.

    With target law p, draft law q and token x drawn from q: accept x with probability min(1, p(x) /
    q(x)), otherwise draw from the normalised max(0, p - q). Point-mass drafts, the bonus token and
    greedy rows are values of this rule, not cases of it.

    Reference: Leviathan et al., arXiv:2211.17192, Alg. 1 (their p is our target, q our draft); Chen
    et al., arXiv:2302.01318, Alg. 2 (letters the other way round).

    Example:
        >>> import torch
        >>> from specdec.samplers import Noise, RejectionSampler, Warp
        >>> from specdec.types import Draft
        >>> logits = torch.tensor([[[0.0, 9.0, 0.0], [9.0, 0.0, 0.0]]])  # B = 1, K = 1, V = 3
        >>> noise = Noise([0]).at(torch.tensor([4]), width=2)
        >>> draft, greedy = Draft(torch.tensor([[1]])), Warp(1, temperature=0)
        >>> verdict = RejectionSampler()(draft, logits, greedy, noise)
        >>> verdict.tokens, verdict.num_accepted
        (tensor([[1, 0]]), tensor([1]))
    """

    lossless = True

    def forward(self, draft: Draft, target_logits: Tensor, warp: Warp, noise: StepNoise) -> Verdict:
        """Decides one step.

        Args:
            draft: K tokens per row and their laws.
            target_logits: `[B, K + 1, V]`; row i predicts what follows the first i draft tokens.
            warp: the gate from logits to the target's law.
            noise: the step's draws.

        Returns:
            The accepted prefix and one extra token per row.

        Raises:
            ValueError: the draft's vocabulary or length does not fit the logits.
        """
        _check_fit(draft, target_logits, noise)
        if warp.is_greedy:  # the same rule where it leaves nothing to chance, and no law to write
            decided = verify_points(draft.tokens, draft.num_valid, target_logits.argmax(dim=-1))
            return Verdict(*decided, draft.num_valid)
        decided = verify_chain(
            draft.tokens,
            draft.probs,
            draft.num_valid,
            warp(target_logits),
            noise.uniform(Stream.ACCEPT)[:, : draft.tokens.shape[1]],
            noise.uniform(Stream.RESAMPLE)[:, 0],
        )
        return Verdict(*decided, draft.num_valid)


def _check_fit(draft: Draft, target_logits: Tensor, noise: StepNoise) -> None:
    rows, width = draft.tokens.shape
    num_draws = noise.uniform(Stream.ACCEPT).shape[1]
    if num_draws < width:
        raise ValueError(
            f"the noise holds {num_draws} draws per stream for {width} draft tokens; open the step "
            f"with noise.at(start, width={width + 1})"
        )
    if target_logits.shape[:2] != (rows, width + 1):
        raise ValueError(
            f"target logits must be [{rows}, {width + 1}, V] for a draft of shape {[rows, width]}, "
            f"got {list(target_logits.shape)}"
        )
    if draft.probs is not None and draft.probs.shape[-1] != target_logits.shape[-1]:
        raise ValueError(
            f"draft.probs has vocabulary {draft.probs.shape[-1]} but target logits have "
            f"{target_logits.shape[-1]}; "
            "the drafter must express its law over the target's vocabulary"
        )
