"""`ForeignSampler` and `ForeignBatchSampler`: somebody else's acceptance rule as a sampler of this
library.

Legend: B rows, K draft tokens, V vocabulary.
"""

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from specdec.arguments import check_integer, check_number, shown
from specdec.kernels import draw
from specdec.kernels.race.reference import first_arrival
from specdec.samplers import LogitsFilter, Sampler, StepNoise, Stream
from specdec.types import PAD_TOKEN, Draft, Verdict


class RuleNoise:
    """The randomness of a step: of B rows, or of one, then without the axis of rows.

    Attributes:
        accept: `[B, K]` float64 uniforms in [0, 1), one to decide on each draft token.
        resample: `[B]` float64 uniforms in [0, 1), to draw the extra token.
        exponentials: `[B, V]` float64 Exp(1) draws, to draw the extra token by a race instead;
            `None` for a rule that draws it by `resample`.

    Example:
        >>> noise = RuleNoise(torch.tensor([[0.2, 0.9]]).double(), torch.tensor([0.6]).double())
        >>> noise.draw(torch.tensor([[0.5, 0.25, 0.25]])), noise[0].accept.shape
        (tensor([1]), torch.Size([2]))
    """

    def __init__(self, accept: Tensor, resample: Tensor, exponentials: Tensor | None = None):
        self.accept, self.resample, self.exponentials = accept, resample, exponentials

    def __getitem__(self, rows: Tensor | int) -> "RuleNoise":
        races = None if self.exponentials is None else self.exponentials[rows]
        return RuleNoise(self.accept[rows], self.resample[rows], races)

    def draw(self, weights: Tensor) -> Tensor:
        """The indices `[B]` that this noise draws in proportion to `[B, V]` weights."""
        if self.exponentials is None:
            return draw(weights, self.resample)
        return first_arrival(weights, self.exponentials)


Rule = Callable[[Tensor, Tensor, Tensor, RuleNoise], Tensor | Sequence[int]]
"""`(draft_tokens [K], draft_probs [K, V], target_probs [K + 1, V], noise) -> tokens`: the accepted
draft tokens and one more. K is at least 1.
"""

BatchRule = Callable[[Tensor, Tensor, Tensor, RuleNoise], Tensor]
"""`(draft_tokens [B, K], draft_probs [B, K, V], target_probs [B, K + 1, V], noise) -> tokens
[B, K + 1]`: in each row the accepted draft tokens, one more, and `PAD_TOKEN`. K is at least 1, and
that of all rows.
"""


class ForeignBatchSampler(Sampler):
    """Runs a rule of another library, a batch at a time, so that `certify` can try it.

    Rules are shown distributions, not logits; a deterministic draft is shown as a one-hot one. Rows
    with fewer draft tokens are shown apart, and those without any not at all.
    `certify` enumerates a rule that decides by thresholds: it accepts a token where that token's
    `noise.accept` is small, and draws the extra token with `noise.resample`, or by a race of
    `noise.exponentials`. Any other use of the noise, or random numbers of its own, is
    *inconclusive* there and tested by draws.

    Args:
        rule: see `BatchRule`.
        name: for reports; the rule's own by default.
        races: the rule draws the extra token by a race: the least `exponential / weight` wins.
        bits: uniforms are shown as multiples of 2**-bits, those that its own generator makes:
            `torch.rand` has 24 in float32.
        tolerance: what the arithmetic of the rule allows its probabilities to be off, such as 1e-6
            for float32; `certify` uses it where it is larger than its own.

    Example:
        >>> from specdec.lab.certificates import ForeignBatchSampler, certify
        >>> def follow_the_draft(draft_tokens, draft_probs, target_probs, noise):
        ...     return torch.cat([draft_tokens, noise.draw(target_probs[:, -1])[:, None]], dim=1)
        >>> certify(ForeignBatchSampler(follow_the_draft), sizes=((2, 1, 1),)).passed
        False
    """

    lossless = False  # as far as anyone knows

    def __init__(
        self,
        rule: BatchRule | Rule,
        name: str | None = None,
        *,
        races: bool = False,
        bits: int = 52,
        tolerance: float = 0.0,
    ):
        super().__init__()
        self.rule, self.name = rule, name or getattr(rule, "__name__", type(rule).__name__)
        self.races, self.bits = races, check_integer("bits", bits, 1, 52)
        self.tolerance = check_number("tolerance", tolerance, 0)

    def forward(
        self, draft: Draft, target_logits: Tensor, logits_filter: LogitsFilter, noise: StepNoise
    ) -> Verdict:
        """As `accept`: the rule is asked in greedy batches too, in place of `accept_greedily`."""
        return self.accept(draft, target_logits, logits_filter, noise)

    def accept(
        self, draft: Draft, target_logits: Tensor, logits_filter: LogitsFilter, noise: StepNoise
    ) -> Verdict:
        """One call of the rule for all rows with as many draft tokens."""
        target, drafted = logits_filter(target_logits), draft.tokens.clamp(min=0)
        laws = draft.probs_like(target)
        accept, resample = (
            (noise.uniform(stream) * 2**self.bits).floor() * 2.0**-self.bits
            for stream in (Stream.ACCEPT, Stream.RESAMPLE)
        )
        races = noise.exponentials(target.shape[-1]) if self.races else None
        width, valid = drafted.shape[1], draft.num_valid
        if valid is None:
            valid = drafted.new_full((len(drafted),), width)
        tokens = drafted.new_full((len(drafted), width + 1), PAD_TOKEN)
        for k in valid.unique().tolist():
            rows = (valid == k).nonzero()[:, 0]
            shown_noise = RuleNoise(accept[:, :k], resample[:, 0], races)[rows]
            if k == 0:
                tokens[rows, 0] = shown_noise.draw(target[rows, 0])
                continue
            inputs = drafted[rows, :k], laws[rows, :k], target[rows, : k + 1], shown_noise
            tokens[rows, : k + 1] = self._ask(*inputs)
        counts = (tokens != PAD_TOKEN).sum(dim=1) - 1
        return Verdict(tokens, counts.clamp(min=0), draft.num_valid)

    def _ask(self, drafted: Tensor, laws: Tensor, target: Tensor, noise: RuleNoise) -> Tensor:
        shape = len(drafted), drafted.shape[1] + 1
        what = f"integers {list(shape)}, padded with {PAD_TOKEN}"
        said = self.rule(drafted, laws, target, noise)
        return self._ids(said, [shape], what, drafted.device)

    def _ids(
        self, said: object, shapes: list[tuple[int, ...]], expected: str, device: torch.device
    ) -> Tensor:
        """What a rule returned, as ids, whose values are looked at like those of every sampler."""
        try:
            ids = torch.as_tensor(said, device=device)
            is_ids = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
            is_ids &= tuple(ids.shape) in shapes
        except Exception:  # of any kind: torch has no word for what is no array
            is_ids = False
        if not is_ids:
            raise TypeError(f"{self.name} returned {shown(said)}; expected {expected}")
        return ids.long()


class ForeignSampler(ForeignBatchSampler):
    """As `ForeignBatchSampler`, of a rule that looks at one row at a time.

    Args:
        rule: see `Rule`.
        name, races, bits, tolerance: as for `ForeignBatchSampler`.

    Example:
        >>> from specdec.lab.certificates import ForeignSampler, certify
        >>> def follow_the_draft(draft_tokens, draft_probs, target_probs, noise):
        ...     return [*draft_tokens.tolist(), int(noise.draw(target_probs[-1]))]
        >>> certify(ForeignSampler(follow_the_draft), sizes=((2, 1, 1),)).passed
        False
    """

    def _ask(self, drafted: Tensor, laws: Tensor, target: Tensor, noise: RuleNoise) -> Tensor:
        most = drafted.shape[1] + 1
        tokens = drafted.new_full((len(drafted), most), PAD_TOKEN)
        what = f"some of the {most - 1} draft tokens, in order, and one more"
        for row in range(len(drafted)):
            said = self.rule(drafted[row], laws[row], target[row], noise[row])
            shapes = [(count,) for count in range(1, most + 1)]
            ids = self._ids(said, shapes, what, drafted.device)
            tokens[row, : len(ids)] = ids
        return tokens


def is_declared_lossy(sampler: Sampler) -> bool:
    """Its class says so; of a foreign rule nobody knows."""
    return not sampler.lossless and not isinstance(sampler, ForeignBatchSampler)


def huggingface_rule(
    draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, noise: RuleNoise
) -> Tensor:
    """The speculative sampling of transformers, with its random numbers taken from `noise`.

    Its distribution is exact. But it accepts where `r <= p / q`, and `torch.rand` can return 0:
    then it accepts a token that the target cannot emit. `certify` says so.

    Args and returns: see `Rule`.

    Example:
        >>> from specdec.lab.certificates import ForeignSampler, certify, huggingface_rule
        >>> report = certify(ForeignSampler(huggingface_rule), sizes=((2, 1, 2),))
        >>> report.deviation < 1e-12, {failure.kind for failure in report.failures}
        (True, {'zero'})
    """
    from specdec.hf.generation import speculative_sampling

    rule = speculative_sampling()
    options = {"is_done_candidate": False}  # an argument of some releases
    known = inspect.signature(rule).parameters
    # HF names no device for what it makes.
    with draft_tokens.device, AnswerFrom(noise):
        tokens, _ = rule(
            candidate_input_ids=draft_tokens[None],
            candidate_logits=draft_probs.log()[None],
            candidate_length=len(draft_tokens),
            new_logits=target_probs.log()[None],
            **{name: value for name, value in options.items() if name in known},
        )
    return tokens[0]


class AnswerFrom(TorchFunctionMode):
    """Within it, torch's random numbers are a rule's noise: `torch.rand` and `rand_like` are the
    accepting uniforms, `torch.multinomial` is what the noise draws, and `Tensor.exponential_` are
    the exponentials.

    Args:
        noise: of a row, or of a batch.

    Example:
        >>> with AnswerFrom(RuleNoise(torch.tensor([0.25]), torch.tensor(0.5))):
        ...     torch.rand(1), torch.multinomial(torch.tensor([3.0, 1.0]), 1)
        (tensor([0.2500]), tensor([0]))
    """

    def __init__(self, noise: RuleNoise):
        super().__init__()
        self.noise = noise

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """The noise, where a random number is asked for."""
        kwargs = kwargs or {}
        if func is torch.rand_like:
            return self.noise.accept.reshape(args[0].shape).to(args[0].dtype)
        if func is torch.rand:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            return self.noise.accept.reshape(*args).to(dtype)
        if func is torch.multinomial:
            return self.noise.draw(args[0])[..., None]
        if func is torch.Tensor.exponential_:
            return args[0].copy_(self.noise.exponentials)
        return func(*args, **kwargs)
