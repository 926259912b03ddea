"""`Sentinel`: bets along the texts of a generator, and `TextTest`, what they have shown so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.arguments import check_integer, check_number, shown
from specdec.generator import SpeculativeGenerator
from specdec.lab.certificates.foreign import is_declared_lossy
from specdec.lab.certificates.generator.alternatives import BestFit, Ratios
from specdec.lab.certificates.generator.directions import DIRECTIONS, DRAFT_ABOVE, TOP
from specdec.lab.certificates.generator.learned import Learned
from specdec.lab.certificates.generator.martingale import ON_ALTERNATIVES, Wealth, needed_score
from specdec.lab.certificates.generator.reading import Reader, ZeroToken
from specdec.row_step import RowStep
from specdec.targets import Target

_SIGMAS = 1.96  # of 95 % intervals
_ROUNDED = 0.002
"""Tolerance in half precision, where the loop's own distributions are not known."""
ON_LOOP = 0.25
"""Share of the wealth that is bet on the loop's own distributions, where these are known."""
_SMALL = 0.01
"""A p below which a pass needs a comment."""
MOST_FAR = 1 / 500
"""Share of tokens at which the loop may be further from HF's forward than rounding: a cutoff that
falls between two nearly equal tokens.
"""


class CertificateError(AssertionError):
    """Texts of a run do not have the target's distribution.

    Example:
        >>> from specdec.lab import zoo
        >>> sentinel = Sentinel(SpeculativeGenerator(zoo.load_target(), None))
        >>> sentinel([[7, 8, 9]], [[1, 1]], temperature=1.0, top_k=1)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        specdec.lab.certificates.generator.along.CertificateError: the texts of this run do not...
    """


@dataclass(frozen=True)
class Leaning:
    """How far texts lean in one direction: the mean of f beyond its expectation, per token."""

    name: str  # a key of `DIRECTIONS`
    mean: float
    error: float  # its standard deviation in a sound generator; 0 where f is constant
    accept_effect: float = 0.0  # what accept draws that are 1 % too small add to the mean

    @property
    def z(self) -> float:
        """In standard deviations."""
        return self.mean / self.error if self.error else 0.0


@dataclass(frozen=True)
class TextTest:
    """What bets along texts have shown.

    Args:
        num_tokens: that were bet on.
        num_texts: of which they are.
        log_e: logarithm of the e-value.
        log_peak: of the largest one so far.
        false_alarm: alpha, the chance that a sound generator ever exceeds 1 / alpha.
        leanings: by direction.
        positions: of the direction with the largest z, by the position in the step at which a token
            was emitted, `"bonus"` for bonus tokens; empty where steps are not known.
        draft_distance: mean total variation between draft and target, 0 without drafts.
        loop_distance: mean total variation between what the loop drew from and the target's own
            forward; `None` where that is not known.
        far_share: share of the tokens where it is more than sqrt(eps).
        rounding_share: likewise of two sound computations, where the target is in half precision.
        is_lossless: the sampler does not declare that it is lossy.
        impossible: tokens of probability 0, which rounding does not explain; one is decisive.
        num_at_cut: tokens of probability 0 which rounding explains.
        losses: the `deviation` by the position in the step; empty where steps are not known.
        best_fit: the other distribution, and the place, that texts speak for most.
    """

    num_tokens: int
    num_texts: int
    log_e: float
    log_peak: float
    false_alarm: float
    leanings: tuple[Leaning, ...]
    positions: dict[str, Leaning]
    draft_distance: float
    loop_distance: float | None
    far_share: float
    rounding_share: float
    is_lossless: bool
    impossible: tuple[ZeroToken, ...] = ()
    num_at_cut: int = 0
    losses: Mapping[str, Leaning] = field(default_factory=dict)
    best_fit: BestFit | None = None

    @property
    def passed(self) -> bool:
        """Nothing was found; `detectable` says what would have been."""
        is_poor = self.log_peak < -math.log(self.false_alarm)
        return is_poor and not self.impossible and self.far_share <= self.most_far

    @property
    def most_far(self) -> float:
        """Largest `far_share` of a sound generator: rounding may move the loop twice as often as it
        moves one sound computation from another.
        """
        return MOST_FAR + 2 * self.rounding_share

    @property
    def e_value(self) -> float:
        """The wealth of the bets."""
        return math.exp(min(self.log_e, 700.0))

    @property
    def p_value(self) -> float:
        """Chance that a sound generator ever comes so far; 0 with an impossible token."""
        return 0.0 if self.impossible else math.exp(-self.log_peak)

    @property
    def deviation(self) -> Leaning:
        """The probability that moves to tokens which the draft prefers (without drafts: to the
        likeliest token), as a total variation.
        """
        return _deviation(self.leanings, bool(self.draft_distance))

    @property
    def detectable(self) -> float:
        """The smallest `deviation`, a total variation, that would have been found in 95 of 100 runs
        of as many tokens.
        """
        return min(1.0, self._score * self.deviation.error or 1.0)

    @property
    def detectable_accept(self) -> float:
        """Likewise by how much accept draws are off, as a factor: 0.02 for draws x 0.98."""
        leanings = [lean for lean in self.leanings if lean.accept_effect and lean.error]
        sizes = [lean.error / abs(100 * lean.accept_effect) for lean in leanings]
        return min(1.0, self._score * min(sizes, default=1.0))

    def tokens_for(self, bias: float) -> int:
        """How many tokens make `detectable` as small as a bias."""
        return math.ceil(self.num_tokens * (self.detectable / bias) ** 2)

    @property
    def _score(self) -> float:
        share = (1 - ON_ALTERNATIVES) * (1.0 if self.loop_distance is None else 1 - ON_LOOP)
        return needed_score((len(DIRECTIONS) - 1) / share, self.false_alarm)

    def __str__(self) -> str:
        kind = "drafted tokens" if self.draft_distance else "the likeliest token"
        lean, moved = max(self.leanings, key=lambda each: abs(each.z)), self.deviation
        lines = [
            f"text: {self.num_tokens} tokens of {self.num_texts} texts: e-value "
            f"{_short(self.log_e)}, p {self.p_value:.2g} (false alarm {self.false_alarm:.0e})",
            f"seen in 95 of 100 runs: {self.detectable:.2%} of probability moved to {kind}"
            + f", accept draws off by {self.detectable_accept:.1%}" * (self.draft_distance > 0),
            f"moved to {kind}: {moved.mean:.2%} +- {_SIGMAS * moved.error:.2%}"
            + f" (a rule that keeps every draft: {self.draft_distance:.1%})"
            * (self.draft_distance > 0),
            f"leans most: {lean.name} ({DIRECTIONS[lean.name].what}), {lean.z:+.1f} sigma",
        ]
        if self.best_fit is not None:
            lines.append(
                f"fits best: {self.best_fit}, e-value {_short(self.best_fit.log_e)} of this bet"
            )
        if self.impossible:
            count = len(self.impossible)
            lines.append(
                f"impossible: {count} token{'s' * (count > 1)} of probability 0 under the declared "
                f"distribution, one of which decides; the first: {self.impossible[0]}"
            )
        if self.num_at_cut:
            lines.append(
                f"{self.num_at_cut} of the tokens stand at the cut of a truncation, where rounding "
                "decides whether they are possible"
            )
        if self.passed and self.p_value < _SMALL:
            lines.append(
                f"p is small: one sound generator in {1 / self.p_value:.0f} comes so far; draw "
                "more texts (num_samples, until_sure=True) to see whether e falls again"
            )
        if self.positions:
            by = ", ".join(f"{name}: {each.z:+.1f}" for name, each in self.positions.items())
            lines.append(f"by position in the step: {by}")
        if self.loop_distance is not None:
            lines.append(
                f"loop: {self.loop_distance:.1e} mean total variation from HF's own forward, "
                f"{self.far_share:.2%} of tokens beyond sqrt(eps), {self.most_far:.2%} is rounding"
            )
        if not self.is_lossless:
            items = self.losses.items()
            by = [f"{n}: {each.mean:.2%} +- {_SIGMAS * each.error:.2%}" for n, each in items]
            lines.append(
                f"lossy, as declared: {moved.mean:.2%} moved to {kind} in use"
                + f"; by position in the step: {', '.join(by)}" * bool(by)
            )
        return "\n          ".join(lines)


class Sentinel:
    """Bets along texts that are generated anyway, and raises an error when they cannot be the
    target's.

    Costs one forward of the target per text, and with drafts one step per token as well. Texts must
    be drawn independently: a seed that serves two rows, or a text that comes twice, is a fault.

    Args:
        generator: that writes the texts.
        false_alarm: alpha: a sound generator raises the error with at most this chance, however
            long it runs.
        with_drafts: whether the drafter drafts once more at every token. Without, a rule that
            accepts too much is seen after many more tokens.
        reference: whose forwards count; `None` for the target's own model.
        tolerance: how far the mean of a direction (with values in -1..1) may be off by rounding;
            `None` for 0, in half precision 0.002.
        raises: whether an error is raised; `found` tells in any case.

    Example:
        >>> from specdec import PromptLookupDrafter, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), PromptLookupDrafter(3))
        >>> options = dict(temperature=1.0, neutral=True, max_new_tokens=8, seed=0)
        >>> result = generator.generate(torch.tensor([[7, 8, 9]]), **options)
        >>> sentinel = Sentinel(generator)
        >>> sentinel([[7, 8, 9]], result.new_tokens.tolist(), temperature=1.0, neutral=True)
        >>> sentinel.found.passed, sentinel.found.num_tokens
        (True, 8)
    """

    def __init__(
        self,
        generator: SpeculativeGenerator,
        *,
        false_alarm: float = 1e-6,
        with_drafts: bool = False,
        reference: PreTrainedModel | None = None,
        tolerance: float | None = None,
        raises: bool = True,
    ):
        check_generator(generator)
        check_reference(reference, generator.target)
        if tolerance is not None:
            check_number("tolerance", tolerance, 0)
        self._alarm = check_number("false_alarm", false_alarm, above=0, below=1)
        self._reader = Reader(generator, reference, with_drafts)
        self._tolerance, self._raises, self._learned = tolerance, raises, Learned()
        self._wealth: Wealth | None = None
        self._num_texts, self._knows_loop = 0, False
        self._impossible: list[ZeroToken] = []
        self._num_at_cut = 0
        # By position in the step, "" for all, sums over tokens: gains, variances and effects of
        # each direction, distances of draft and loop, whether loop and rounding are far, and 1.
        self._sums: dict[str, Tensor] = {}

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[Sequence[int]],
        *,
        steps: Sequence[Sequence[RowStep]] | None = None,
        scores: Sequence[Tensor] | None = None,
        **options: Any,
    ) -> None:
        """Bets along finished texts, which were drawn side by side.

        Args:
            prompts: ids of each, without padding.
            texts: ids of what was generated, the token that ended it included; no padding.
            steps: `GenerationResult.steps`, where positions in steps are of interest.
            scores: `GenerationResult.scores`, where what the loop drew from is to be compared.
            options: of `generate`, with which the texts were drawn; the same for all, but
                `row_inputs` with a value per text.

        Raises:
            TypeError, ValueError: the texts are greedy, or not as many as the prompts; ids that the
                target does not have; steps or scores of other texts; options for which `generate`
                would raise.
            CertificateError: sound texts come so far with a chance below `false_alarm`.
        """
        if len(prompts) != len(texts):
            raise ValueError(
                f"got {len(prompts)} prompts and {len(texts)} texts; pass the prompt of each text, "
                "GenerationResult.prompts for instance"
            )
        vocab_size = self._reader.generator.target.vocab_size
        prompts, texts = (
            _ids(n, v, vocab_size) for n, v in (("prompts", prompts), ("texts", texts))
        )
        own = steps, scores, options.get("row_inputs")
        pairs = [(p, t) for p, t in zip(prompts, texts, strict=True) if t]
        if len(pairs) < len(texts) and any(each is not None for each in own):
            raise ValueError(
                "a text is empty; leave it out together with its steps, scores and row inputs"
            )
        if not pairs:
            return
        _check_beside(texts, steps, scores)
        if self._wealth is None:
            rounded = self._reader.is_rounded and scores is None
            usual = _ROUNDED if rounded else 0.0
            self._wealth = Wealth(
                len(DIRECTIONS),
                tolerance=usual if self._tolerance is None else self._tolerance,
                last=0.0 if scores is None else ON_LOOP,
                alternatives=True,
            )
        prompts, texts = map(list, zip(*pairs, strict=True))
        reading = self._reader.read(prompts, texts, options, scores, self._learned, self._num_texts)
        read = reading.gains
        self._impossible += reading.impossible
        self._num_at_cut += reading.num_at_cut
        lengths = torch.tensor([len(text) for text in texts], device="cpu")
        is_text = torch.arange(read.gains.shape[1], device="cpu") < lengths[:, None]  # [B, T]
        bets = None if scores is None else read.loop_bets
        self._wealth.add(read.gains, lengths, bets, Ratios(read.ratios, read.spreads))
        self._num_texts += len(texts)
        self._knows_loop |= scores is not None
        rounding = torch.finfo(self._reader.generator.target.dtype).eps ** 0.5
        far = torch.stack([read.loop_distance, read.rounding]) > rounding
        distances = read.distance, read.loop_distance, *far, is_text
        labels = [_labels(row, is_text.shape[1]) for row in steps or [()] * len(texts)]
        is_drafted = torch.tensor(
            [[label != "bonus" for label in row] for row in labels], device="cpu"
        )
        effects = read.effects * is_drafted[..., None]
        facts = [read.gains, read.variances, effects, torch.stack(distances, dim=-1)]
        facts = torch.cat(facts, dim=-1)  # [B, T, 3 D + 5]
        for label in {"", *(label for row in labels for label in row)}:
            here = torch.tensor(
                [[label in ("", other) for other in row] for row in labels], device="cpu"
            )
            here = facts[is_text & here].sum(dim=0)
            self._sums[label] = self._sums.get(label, 0) + here
        if self._raises and not (found := self.found).passed:
            declared = "" if found.is_lossless else " (the rule is lossy, as declared)"
            raise CertificateError(
                f"the texts of this run do not have the target's distribution{declared}; "
                f"certify(generator, prompts) says more\n          {found}"
            )

    @property
    def found(self) -> TextTest:
        """What was found so far."""
        if self._wealth is None:
            raise ValueError("no text was bet on yet")
        by = {label: _leanings(sums) for label, sums in self._sums.items()}
        leanings = by[""]
        most = max(range(len(leanings)), key=lambda number: abs(leanings[number].z))
        labels = sorted(self._sums.keys() - {""}, key=lambda label: (label == "bonus", label))
        *means, count = self._sums[""][-5:].tolist()
        distance, loop_distance, far, rounding = (mean / count for mean in means)
        return TextTest(
            num_tokens=int(count),
            num_texts=self._num_texts,
            log_e=self._wealth.log_e,
            log_peak=self._wealth.log_peak,
            false_alarm=self._alarm,
            leanings=leanings,
            positions={label: by[label][most] for label in labels},
            draft_distance=distance,
            loop_distance=loop_distance if self._knows_loop else None,
            far_share=far,
            rounding_share=rounding,
            is_lossless=not is_declared_lossy(self._reader.generator.sampler),
            impossible=tuple(self._impossible),
            num_at_cut=self._num_at_cut,
            losses={label: _deviation(by[label], bool(distance)) for label in labels},
            best_fit=self._wealth.alternatives.best,
        )


def check_generator(generator: Any) -> None:
    """Raises `TypeError` for anything else."""
    if not isinstance(generator, SpeculativeGenerator):
        raise TypeError(
            "generator must be the SpeculativeGenerator that writes the texts, got "
            f"{shown(generator)}"
        )


def check_reference(reference: Any, target: Target) -> None:
    """Raises `TypeError` for what is no causal model of HF's, and `ValueError` for one of another
    vocabulary than the target's.
    """
    if reference is None:
        return
    if not isinstance(reference, PreTrainedModel):
        raise TypeError(
            "reference must be a model of HF's (a PreTrainedModel), for instance a copy of the "
            f"target in float32, or None for the target's own; got {shown(reference)}"
        )
    if not reference.can_generate():
        raise TypeError(
            f"reference must have logits of the next token, and a {type(reference).__name__} has "
            "none; pass the model with its head (AutoModelForCausalLM)"
        )
    own = reference.config.get_text_config().vocab_size
    if own != target.vocab_size:
        raise ValueError(
            f"reference has a vocabulary of {own} and the target one of {target.vocab_size}; pass "
            "a copy of the target, for instance in float32"
        )


def _ids(name: str, rows: Sequence[Sequence[int]], vocab_size: int) -> list[list[int]]:
    """Token ids of each row, as plain integers."""
    try:
        rows = [[index(token) for token in row] for row in rows]
    except TypeError as error:
        raise TypeError(f"{name} must be lists of token ids: {error}") from error
    for number, row in enumerate(rows):
        for token in row:
            advice = "were they encoded with the target's tokenizer?"
            check_integer(f"a token of {name}[{number}]", token, 0, vocab_size - 1, advice=advice)
    return rows


def _check_beside(
    texts: list[list[int]], steps: Sequence | None, scores: Sequence[Tensor] | None
) -> None:
    """Raises `ValueError` for steps or scores of other texts."""
    if steps is not None:
        counts = [sum(len(step.new_tokens) for step in row) for row in steps]
        if counts != [len(text) for text in texts]:
            raise ValueError(
                f"steps have {counts} new tokens and texts {[len(text) for text in texts]}; pass "
                "GenerationResult.steps of the same call, or leave steps out"
            )
    longest = max(map(len, texts))
    if scores is not None and (len(scores) < longest or len(scores[0]) != len(texts)):
        raise ValueError(
            f"scores must have {longest} columns or more, of {len(texts)} rows each, as the texts "
            f"have, got {len(scores)} columns; pass GenerationResult.scores of the same call"
        )


def _deviation(leanings: tuple[Leaning, ...], has_drafts: bool) -> Leaning:
    """The one that is a total variation."""
    found = leanings[DRAFT_ABOVE]
    if has_drafts:
        return Leaning(found.name, found.mean / 2, found.error / 2)
    return leanings[TOP]


def _leanings(sums: Tensor) -> tuple[Leaning, ...]:
    """Of one of `Sentinel._sums`."""
    gains, variances, effects = sums[:-5].view(3, -1)
    numbers = torch.stack([gains, variances.sqrt(), effects / 100]) / sums[-1]
    return tuple(map(Leaning, DIRECTIONS, *numbers.tolist()))


def _labels(steps: Sequence[RowStep], count: int) -> list[str]:
    """Where in its step each token was emitted, `""` where that is not known."""
    labels = [
        "bonus" if kind == "bonus" else str(position)
        for step in steps
        for position, kind in enumerate(step.kinds, start=1)
    ]
    return (labels + [""] * count)[:count]


def _short(log_e: float) -> str:
    return f"{math.exp(log_e):.2g}" if abs(log_e) < 200 else f"1e{log_e / math.log(10):.0f}"
