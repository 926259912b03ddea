"""`ForeignSampler`: somebody else's acceptance rule, a row at a time, as a sampler of this library.

Legend: B rows, K draft tokens, V vocabulary.
"""

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from specdec.arguments import shown
from specdec.kernels import draw
from specdec.samplers import Sampler, StepNoise, Stream, Warp
from specdec.types import PAD_TOKEN, Draft, Verdict


class RowNoise:
    """The randomness of one row and step.

    Attributes:
        accept: `[K]` float64 uniforms in [0, 1), one to decide on each draft token.
        resample: float64 uniform in [0, 1), to draw the extra token.
    """

    def __init__(self, accept: Tensor, resample: Tensor):
        self.accept = accept
        self.resample = resample

    def draw(self, weights: Tensor) -> Tensor:
        """The index that `resample` draws in proportion to `[V]` weights."""
        return draw(weights, self.resample)


Rule = Callable[[Tensor, Tensor, Tensor, RowNoise], Tensor | Sequence[int]]
"""`(draft_tokens [K], draft_probs [K, V], target_probs [K + 1, V], noise) -> tokens`: the accepted
draft tokens and one more.
"""


class ForeignSampler(Sampler):
    """Runs a rule of another library, row by row, so that `certify` can try it.

    Rules are shown distributions, not logits; a deterministic draft is shown as a one-hot one.
    `certify` enumerates a rule that decides by thresholds: it accepts a token where that token's
    `noise.accept` is small, and draws the extra token with `noise.resample`. Any other use of the
    noise, or random numbers of its own, is *inconclusive* there and tested by draws.

    Args:
        rule: see `Rule`.
        name: for reports; the rule's own by default.

    Example:
        >>> from specdec.certify import ForeignSampler, certify
        >>> def follow_the_draft(draft_tokens, draft_probs, target_probs, noise):
        ...     return [*draft_tokens.tolist(), int(noise.draw(target_probs[-1]))]
        >>> certify(ForeignSampler(follow_the_draft), sizes=((2, 1, 1),)).passed
        False
    """

    lossless = False  # as far as anyone knows

    def __init__(self, rule: Rule, name: str | None = None):
        super().__init__()
        self.rule, self.name = rule, name or getattr(rule, "__name__", type(rule).__name__)

    def accept(self, draft: Draft, target_logits: Tensor, warp: Warp, noise: StepNoise) -> Verdict:
        """Row by row."""
        target, drafted = warp(target_logits), draft.tokens.clamp(min=0)
        laws = draft.probs
        if laws is None:
            laws = torch.nn.functional.one_hot(drafted, target.shape[-1]).to(target)
        accept, resample = noise.uniform(Stream.ACCEPT), noise.uniform(Stream.RESAMPLE)[:, 0]
        rows, width = drafted.shape
        valid = [width] * rows if draft.num_valid is None else draft.num_valid.tolist()
        tokens = torch.full((rows, width + 1), PAD_TOKEN, device=drafted.device)
        counts = []
        for row, k in enumerate(valid):
            row_noise = RowNoise(accept[row, :k], resample[row])
            out = self._run(drafted[row, :k], laws[row, :k], target[row, : k + 1], row_noise)
            tokens[row, : len(out)] = out
            counts.append(len(out) - 1)
        return Verdict(tokens, torch.tensor(counts, device=drafted.device), draft.num_valid)

    def _run(self, drafted: Tensor, laws: Tensor, target: Tensor, noise: RowNoise) -> Tensor:
        """Ids, whose values are looked at like those of every sampler."""
        said = self.rule(drafted, laws, target, noise)
        try:
            out = torch.as_tensor(said, device=drafted.device)
            is_ids = not (out.is_floating_point() or out.is_complex() or out.dtype == torch.bool)
        except Exception:  # of any kind: torch has no word for what is no array
            is_ids = False
        if not is_ids or out.dim() != 1 or not 1 <= len(out) <= len(drafted) + 1:
            raise TypeError(
                f"{self.name} returned {shown(said)}; expected some of the {len(drafted)} draft "
                "tokens, in order, and one more"
            )
        return out


def huggingface_rule(
    draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, noise: RowNoise
) -> Tensor:
    """The speculative sampling of transformers, with its random numbers taken from `noise`.

    Its law is exact. But it accepts where `r <= p / q`, and `torch.rand` can return 0: then it
    accepts a token that the target cannot emit. `certify` says so.

    Args and returns: see `Rule`. Without a draft there is nothing to call.

    Example:
        >>> from specdec.certify import ForeignSampler, certify, huggingface_rule
        >>> report = certify(ForeignSampler(huggingface_rule), sizes=((2, 1, 2),))
        >>> report.deviation < 1e-12, {failure.kind for failure in report.failures}
        (True, {'zero'})
    """
    if len(draft_tokens) == 0:
        return noise.draw(target_probs[0])[None]
    from transformers.generation.utils import _speculative_sampling

    options = {"is_done_candidate": False}  # an argument of some releases
    known = inspect.signature(_speculative_sampling).parameters
    with _AnswerFrom(noise):
        tokens, _ = _speculative_sampling(
            candidate_input_ids=draft_tokens[None],
            candidate_logits=draft_probs.log()[None],
            candidate_length=len(draft_tokens),
            new_logits=target_probs.log()[None],
            **{name: value for name, value in options.items() if name in known},
        )
    return tokens[0]


class _AnswerFrom(TorchFunctionMode):
    """Answers `torch.rand_like` and `torch.multinomial` from a row's noise."""

    def __init__(self, noise: RowNoise):
        super().__init__()
        self._noise = noise

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.rand_like:
            return self._noise.accept.view_as(args[0])
        if func is torch.multinomial:
            return self._noise.draw(args[0])[..., None]
        return func(*args, **(kwargs or {}))
