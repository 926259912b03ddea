"""What `certify_sampler` found, in words and numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from textwrap import fill

import torch
from torch import Tensor

from specdec.lab.certificates.chisquare import DETECTABLE
from specdec.lab.certificates.sampler.problems import Problems

KINDS = {
    "law": (
        "the rule emits a text with another probability than the target",
        "a draft token accepted more often than target / draft; a recovered token that is not "
        "drawn from max(0, target - draft), normalised; a bonus token from another row of the "
        "target; one uniform for two decisions",
    ),
    "zero": (
        "a text of probability 0 under the target is emitted",
        "`<=` in place of `<` in u * draft < target; a quotient target / draft >= u, which accepts "
        "at u = 0; a recovered or bonus token of another row of the target, or without its "
        "truncation (top-k, top-p)",
    ),
    "draft": (
        "draft tokens are not drawn from the probabilities that are reported with them",
        "draw_draft returns the likeliest tokens, or draws after a truncation or at a temperature, "
        "and returns other probabilities; it uses one number for two tokens",
    ),
    "decision": (
        "a race is won by another token than its own distribution predicts",
        "another position's noise, or a winner that depends on what was drafted",
    ),
    "rows": (
        "a row is not decided on by what it has alone: its draft, its logits, its numbers",
        "rows that change places with others; something kept from an earlier call, or for a batch "
        "of that size; a number or a decision of one row that serves all",
    ),
    "ids": (
        "a token is not decided on by its probabilities alone: its id, or the size of the "
        "vocabulary, has a part",
        "an id that is treated by its number, such as that of an end of text; an integer type too "
        "small for ids; a size from which another code runs",
    ),
    "state": (
        "a rule is no function of its draft, its logits and its numbers: calls change it, and what "
        "it decides later was not tried",
        "a count of calls, a list that grows, a moving mean, kept in the rule, in its class or in "
        "what its functions read; keep them beside the generator, which reports every step",
    ),
    "draws": (
        "the shares of drawn texts are not the target's probabilities",
        "one uniform for two decisions (two draft tokens, or accepting and drawing); a draft token "
        "accepted where its uniform is large; random numbers besides those of the noise",
    ),
}
"""Of failures: what each means, and its usual causes, where a problem's numbers do not say more."""

_OF_LOSSY = {"law", "zero", "draws"}
"""Kinds of what a lossy rule does."""

PROBLEM = "a problem is a small target and draft, tables of which all probabilities are known"


@dataclass(frozen=True)
class Failure:
    """Something that a lossless sampler does not do.

    Args:
        kind: of `KINDS`.
        size: how far off.
        text: what, and where.
        width: draft tokens of the problem; a report shows the failure with the fewest.
        table: lines with the problem's distributions.
        cause: what they say of the rule, where they decide it.
    """

    kind: str
    size: float
    text: str
    width: int = 0
    table: tuple[str, ...] = ()
    cause: str | None = None


@dataclass(frozen=True)
class DrawnEvidence:
    """Why a sampler was tested by draws, and what these could see.

    Args:
        reason: why its distribution could not be enumerated.
        num_draws: texts per problem.
        p_value: the smallest.
        threshold: what no p-value must fall below.
        false_alarm: chance that a lossless sampler fails one of the tests.
        detectable: total variation in a problem that is detected with 99 % power.
    """

    reason: str
    num_draws: int
    p_value: float
    threshold: float
    false_alarm: float
    detectable: float


@dataclass
class SamplerReport:
    """What exact enumeration found, or what tests by draws found where that is inconclusive.

    Attributes:
        name: of the sampler.
        tolerance: for `deviation`.
        deviation: largest difference between the probability of a text of K + 1 tokens and the
            target's (for a race: of a token given its context).
        total_variation: largest between the distributions of such texts and the target's.
        num_problems: contexts tried.
        num_paths: drafted paths tried.
        failures: empty for a lossless sampler.
        accepted: of each batch of problems, until a failure, the mean number of accepted `[W]`,
            and the most that any lossless rule accepts of these drafts, `[W]`.
        losses: of each batch of problems `[W, K + 1]`, the total variation between each emitted
            token's distribution and the target's, given the tokens before it.
        is_declared_lossy: the rule's class says that it is not lossless.
        draft_law: what was found of the way in which the rule has its drafts drawn.
        further: what was found in large vocabularies, with logits of other types, with no and
            with many draft tokens, and of tokens of small probability.
        drawn: `None` if the distribution was enumerated; else the verdict is that of tests by
            draws, and `deviation` and `total_variation` are NaN.

    Example:
        >>> report = SamplerReport("MySampler", tolerance=1e-12)  # of certify(MySampler())
        >>> report.failures.append(Failure("zero", 0.1, "a text of probability 0 is emitted"))
        >>> report.passed, report.verdict, report.is_exact
        (False, 'FAIL', True)
    """

    name: str
    tolerance: float
    deviation: float = 0.0
    total_variation: float = 0.0
    num_problems: int = 0
    num_paths: int = 0
    failures: list[Failure] = field(default_factory=list)
    accepted: list[tuple[Problems, Tensor, Tensor]] = field(default_factory=list, repr=False)
    losses: list[Tensor] = field(default_factory=list, repr=False)
    is_declared_lossy: bool = False
    draft_law: str = ""
    further: str = ""
    drawn: DrawnEvidence | None = None

    @property
    def passed(self) -> bool:
        """Nothing was found."""
        return not self.failures

    @property
    def is_exact(self) -> bool:
        """The verdict is about the distribution itself, not about draws from it."""
        return self.drawn is None

    @property
    def distance(self) -> float:
        """Tokens per step by which the best lossless rule accepts more, where it is most; NaN where
        that was not found.
        """
        most = max(
            (float((most - mean).max()) for _, mean, most in self.accepted), default=math.nan
        )
        return most if self.passed else math.nan

    def add_further(self, found: list[SamplerReport], tried: list[str]) -> None:
        """Takes in what was found beyond the toy problems."""
        self.failures += [failure for one in found for failure in one.failures]
        for one in found:
            if one.failures:
                self.deviation = max(self.deviation, one.deviation)
                self.total_variation = max(self.total_variation, one.total_variation)
        if self.passed:
            count, what = sum(one.num_problems for one in found), ", ".join(dict.fromkeys(tried))
            self.further = f"the same with {what} (exact, {count} problems)"

    def _acceptance(self) -> str:
        """How much it accepts, beside the most that any lossless rule does."""
        families: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for problems, mean, most in self.accepted:
            families.setdefault(problems.family, []).append((mean, most))
        shares = []
        for family, tables in families.items():
            mean, most = (torch.cat(x).mean().item() for x in zip(*tables, strict=True))
            shares.append(f"{family} {mean:.4f} of {most:.4f}")
        problems, mean, most = max(self.accepted, key=lambda batch: (batch[2] - batch[1]).max())
        where = problems.describe(int((most - mean).argmax()))
        text = "accepted per step, of the most that any lossless rule accepts: " + ", ".join(shares)
        if self.distance < 1e-6:
            return f"{text}; in no problem less"
        return f"{text}; at most {self.distance:.3f} less, in {where}"

    @property
    def verdict(self) -> str:
        """`"PASS"`; `"LOSSY"` where only that was found which the rule declares; else `"FAIL"`."""
        if self.passed:
            return "PASS"
        declared = self.is_declared_lossy and {f.kind for f in self.failures} <= _OF_LOSSY
        return "LOSSY" if declared else "FAIL"

    def _loss(self) -> str:
        """How much a lossy rule moves, by the position in its step."""
        if self.passed:
            return "declared lossy, and no loss was found"
        longest = max((batch.shape[1] for batch in self.losses), default=0)
        shares = []
        for place in range(longest):
            each = torch.cat([batch[:, place] for batch in self.losses if batch.shape[1] > place])
            shares.append(f"{place + 1}: {each.mean():.4f} ({each.max():.4f})")
        if not shares or not self.is_exact:
            return "lossy, as declared"
        return (
            "lossy, as declared. How lossy: total variation between the rule's token and the "
            "target's, given the tokens before, mean over the problems (largest), at token "
            f"{', '.join(shares)}"
        )

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        drawn, lines = self.drawn, []
        if drawn is None:
            tried = f"exact, over {self.num_problems} problems, {self.num_paths} drafted paths"
            lines.append(
                f"deviation {self.deviation:.1e} (tolerance {self.tolerance:.0e}), "
                f"total variation {self.total_variation:.1e}"
            )
            if self.passed and self.accepted:
                lines.append(self._acceptance())
        else:
            tried = f"by draws, {drawn.num_draws} texts in each of {self.num_problems} problems"
            lines.append(f"enumeration is inconclusive: {drawn.reason}")
            lines.append(
                f"smallest p-value {drawn.p_value:.1e} (threshold {drawn.threshold:.0e}, false "
                f"alarm {drawn.false_alarm:.0e} over all tests), detectable TV "
                f"{drawn.detectable:.3f}"
            )
        if self.is_declared_lossy:
            lines.append(self._loss())
        if self.draft_law:
            lines.append(self.draft_law)
        if self.passed and self.further:
            lines.append(self.further)
        for kind in dict.fromkeys(failure.kind for failure in self.failures):
            found = [failure for failure in self.failures if failure.kind == kind]
            shown = min(found, key=lambda failure: failure.width)  # the first of the smallest
            meaning, usual = KINDS[kind]
            lines.append(f"{kind} ({len(found)} found): {meaning}. In the smallest problem:")
            lines += [shown.text, *(f"    {line}" for line in shown.table)]
            if self.verdict != "LOSSY":
                lines.append(shown.cause or f"usual causes: {usual}")
        lines.append(f"({PROBLEM}{'' if drawn is None else f'; {DETECTABLE}'})")
        options = {"width": 100, "initial_indent": " " * 6, "subsequent_indent": " " * 8}
        wrapped = [fill(line, **options, replace_whitespace=False) for line in lines]
        return "\n".join([f"{self.verdict}  {self.name}: {tried}", *wrapped])
