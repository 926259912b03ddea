"""`Sampler`: the interface of what accepts or rejects draft tokens.

Legend: B rows, K draft tokens, V vocabulary.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from specdec.kernels.types import VerifyUniforms
from specdec.kernels.verify.verdict import verify, verify_points
from specdec.samplers.logits_filter import LogitsFilter
from specdec.samplers.noise import Drawing, DrawRule, Noise, StepNoise, Stream, draw_by_inversion
from specdec.settings import settings_of
from specdec.types import Draft, Verdict


class Sampler(nn.Module, ABC):
    """Turns a draft and the target's logits into a verdict. It has no access to models and keeps no
    state per row, because row indices change when ended rows leave the batch.

    A rule may use its noise as it likes. But `certify` can enumerate its exact distribution only if
    it decides by thresholds, a draft token being accepted where its `Stream.ACCEPT` uniform is
    small, and the extra token coming from the `Stream.RESAMPLE` uniform; or by races, one or
    several at each position (`StepNoise.race`, `StepNoise.arrivals`). Other rules, and those that
    ask for numbers by names of their own, are tested by draws.

    Attributes:
        lossless: the output has exactly the target's distribution, whatever is drafted.
        draw_draft: how draft tokens have to be drawn.
        uses_draft_probs: it reads draft probabilities.
        uses_accept_draws: it compares the uniforms of `Stream.ACCEPT` with acceptance
            probabilities.
        noise_type: where its random numbers come from.
        takes_trees: it verifies drafts with `parents`, and names the accepted path.

    Example:
        >>> class MatchLikeliest(Sampler):
        ...     lossless = False
        ...     def accept(self, draft, target_logits, logits_filter, noise):
        ...         return self.accept_greedily(draft, target_logits)
        >>> draft, logits = Draft(torch.tensor([[1]])), torch.tensor([[[0.0, 2.0], [3.0, 0.0]]])
        >>> noise = Noise([7]).at(torch.tensor([4]), width=2)
        >>> MatchLikeliest()(draft, logits, LogitsFilter(1), noise).tokens
        tensor([[1, 0]])
    """

    lossless: bool
    draw_draft: DrawRule = staticmethod(draw_by_inversion)
    uses_draft_probs: bool = True
    uses_accept_draws: bool = True
    noise_type: type[Noise] = Noise
    takes_trees: bool = False

    def check_drafter(self, drafter: Any) -> None:
        """Raises `ValueError` for a `Drafter` of trees that it cannot verify; called where a
        generator is built.
        """
        if not self.takes_trees:
            raise ValueError(
                f"{type(self).__name__} verifies chains (takes_trees is False), and "
                f"{type(drafter).__name__} drafts trees; choose another one of the two"
            )

    def settings(self) -> dict[str, Any]:
        """What distinguishes this rule from others, as plain values: its class, its own public
        attributes that are plain values, a fingerprint of its weights if it has any, and whether it
        is lossless. Saved runs hold it, and go on with no other.
        """
        return {**settings_of(self), "lossless": bool(self.lossless)}

    def forward(
        self, draft: Draft, target_logits: Tensor, logits_filter: LogitsFilter, noise: StepNoise
    ) -> Verdict:
        """Verifies one step.

        Args:
            draft: K tokens per row and the probabilities that they were drawn from.
            target_logits: `[B, K + 1, V]`; row i predicts what follows the first i draft tokens.
            logits_filter: from logits to the target's probabilities.
            noise: the step's draws.

        Returns:
            The accepted prefix and one extra token per row.

        Raises:
            ValueError: the draft's vocabulary or length does not fit the logits.
        """
        _check_logits(draft, target_logits)
        if logits_filter.is_greedy:
            return self.accept_greedily(draft, target_logits)
        verdict = self.accept(draft, target_logits, logits_filter, noise)
        if logits_filter.greedy_rows is None:
            return verdict
        exact = self.accept_greedily(draft, target_logits)
        return _by_row(logits_filter.greedy_rows, exact, verdict, draft)

    def from_probs(self, draft: Draft, target_probs: Tensor, noise: StepNoise) -> Verdict:
        """As a call, given the target's probabilities in the place of logits and a filter.

        Args:
            draft: K tokens per row and the probabilities that they were drawn from.
            target_probs: `[B, K + 1, V]`, rows that sum to 1.
            noise: the step's draws.

        Example:
            >>> import torch
            >>> from specdec.samplers import Noise, RejectionSampler
            >>> p = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])  # B = 1, K = 1, V = 2
            >>> draft = Draft(torch.tensor([[1]]), torch.tensor([[[0.5, 0.5]]]))
            >>> RejectionSampler().from_probs(draft, p, Noise([0]).at(torch.tensor([4]), 2)).tokens
            tensor([[1, 0]])
        """
        logits_filter = LogitsFilter(len(target_probs), device=target_probs.device)
        return self(draft, target_probs.log(), logits_filter, noise)

    def drawing(
        self,
        num_draft_tokens: int,
        logits_filter: LogitsFilter,
        noise: StepNoise,
        *,
        wants_probs: bool | None = None,
        wants_raw: bool = False,
    ) -> Drawing:
        """What a drafter has to know of a step that this sampler verifies; Args as `Drawing`.

        `wants_probs` is by default whether this rule reads the probabilities of draft tokens.
        """
        wants_probs = self.uses_draft_probs if wants_probs is None else wants_probs
        return Drawing(
            num_draft_tokens, logits_filter, noise, self.draw_draft, wants_probs, wants_raw
        )

    @abstractmethod
    def accept(
        self, draft: Draft, target_logits: Tensor, logits_filter: LogitsFilter, noise: StepNoise
    ) -> Verdict:
        """As `forward`, for inputs that fit, in a batch where some row samples. The rows at
        temperature 0 get the verdict of `accept_greedily`.
        """

    def accept_greedily(self, draft: Draft, target_logits: Tensor) -> Verdict:
        """As `forward`, for rows at temperature 0, where every distribution of the target is
        one-hot. A rule that accepts other tokens, too, overrides it.
        """
        return verify_points(draft, target_logits.argmax(dim=-1))  # the first of equal maxima


def _by_row(is_first: Tensor, first: Verdict, other: Verdict, draft: Draft) -> Verdict:
    """One verdict in some rows, and another one in the others."""
    if not isinstance(other, Verdict) or other.tokens.shape != first.tokens.shape:
        return other  # no verdict on this draft, which the loop says

    def merged(one: Tensor, two: Tensor) -> Tensor:
        return torch.where(is_first if one.dim() == 1 else is_first[:, None], one, two)

    counts = first.num_drafted, other.num_drafted
    if (num_drafted := next((n for n in counts if n is not None), None)) is not None:
        usual = torch.full_like(num_drafted, draft.tokens.shape[1])
        usual = usual if draft.num_valid is None else draft.num_valid
        num_drafted = merged(*(usual if n is None else n for n in counts))
    has_path = other.path is not None
    return Verdict(
        merged(first.tokens, other.tokens),
        merged(first.num_accepted, other.num_accepted),
        num_drafted,
        merged(first.rows, other.rows) if has_path else None,
    )


def _check_logits(draft: Draft, target_logits: Tensor) -> None:
    rows, width = draft.tokens.shape
    if target_logits.shape[:2] != (rows, width + 1):
        raise ValueError(
            f"target logits must be [{rows}, {width + 1}, V] for a draft of shape {[rows, width]}, "
            f"got {list(target_logits.shape)}"
        )
    if draft.probs is not None and draft.probs.shape[-1] != target_logits.shape[-1]:
        raise ValueError(
            f"draft.probs has vocabulary {draft.probs.shape[-1]} but target logits have "
            f"{target_logits.shape[-1]}; "
            "the drafter must express its probabilities over the target's vocabulary"
        )


def judge(
    draft: Draft,
    target_logits: Tensor,
    logits_filter: LogitsFilter,
    noise: StepNoise,
    *,
    by_block: bool,
) -> Verdict:
    """Accepts token by token, or by one joint rule, a part of a chain or a path of a tree; Args as
    `Sampler.forward`.
    """
    params, uniforms = logits_filter.params(target_logits), rule_uniforms(draft, noise)
    return verify(draft, target_logits, params, uniforms, by_block=by_block)


def rule_uniforms(draft: Draft, noise: StepNoise) -> VerifyUniforms:
    """The uniforms of a rule that accepts each token with a probability.

    Raises:
        ValueError: the step was opened with too few draws.
    """
    width = draft.tokens.shape[1]
    accept, resample = noise.uniform(Stream.ACCEPT), noise.uniform(Stream.RESAMPLE)
    if accept.shape[1] < width:
        raise ValueError(
            f"the noise holds {accept.shape[1]} draws per stream for {width} draft tokens; open "
            f"the step with noise.at(start, width={width + 1})"
        )
    return VerifyUniforms(accept[:, :width], resample[:, 0])
