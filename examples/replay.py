r"""`replay`: estimates for draft lengths and samplers other than those a text was generated with.

Both rules are lossless, so the text has the same distribution under each, and what remains is how
many draft tokens a rule accepts *given the text*. Let p_i and q_i be the probabilities of the
text's i-th token after a root, under the target and under the drafter. Then the probability that
n tokens or more are accepted, given the text, is

- for the token rule (`RejectionSampler`): the product over i = 1..n of min(1, q_i / p_i);
- for the block rule (`BlockSampler`): the minimum over j = 0..n of the product of q_i / p_i over
  i = 1..j.

The first: token y is emitted at an index because it was drafted and accepted with probability
min(q(y), p(y)), and in all with p(y). The second: a block accepts n tokens or more with probability
P_n given the drafted prefix (arXiv:2403.10444, where P_n = min(1, P_{n-1} p_n / q_n)), what follows
then has the target's distribution, and q_1..q_n P_n / (p_1..p_n) is that minimum by induction.
Neither depends on K. So one pass over the text (`every_position`) gives every K up to its own, with
the accept draws integrated out: the chance that a position is a root follows by a forward
recursion over the text.

A run visits few positions of its text: those after which its own draft length and sampler happened
to stop. So the finished text is read once more: at every position the drafter drafts, and each
token that it "draws" is the text's own.

Legend: B rows, T tokens of a text, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from specdec import BlockSampler, Draft, Drafter, LogitsFilter, RejectionSampler, Sampler, Verdict
from specdec.arguments import check_integer, shown
from specdec.generator import SpeculativeGenerator
from specdec.lab.evaluation.costs import CostCurve
from specdec.lab.evaluation.intervals import (
    LEVEL,
    Estimate,
    rate_estimates,
    rates_by_position,
    resampled,
)
from specdec.lab.show.table import Table, Tabular
from specdec.lab.trace import Trace
from specdec.lab.trace.record import StepNumbers
from specdec.request import Sampling
from specdec.request.lists import left_padded
from specdec.row_step import RowStep
from specdec.samplers.given import GivenText, emit


@dataclass(frozen=True, eq=False, repr=False)
class Replay(Tabular):
    """Expected counts of runs with other settings, per row of the trace.

    Args:
        num_draft_tokens: K of the settings.
        sampler: its name.
        totals: `[rows, 3 + 2 K]` expected steps, drafted and accepted tokens, then steps that
            accepted, and that reached, each position.
        level: of the intervals, which resample rows.
    """

    num_draft_tokens: int
    sampler: str
    totals: np.ndarray
    level: float = LEVEL

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """`acceptance_length`, `acceptance_rate`, `conditional_rate_1..K`, `joint_rate_1..K` as
        `Evaluation.estimates` has them.
        """
        return rate_estimates(self.totals, self.num_draft_tokens, level=self.level, unit="text")

    @property
    def acceptance_length(self) -> Estimate:
        """1 + accepted tokens per step."""
        return self.estimates["acceptance_length"]

    def speedup(self, costs: CostCurve) -> Estimate:
        """Predicted speed over plain decoding: acceptance length / step cost at this K.

        Rows and the rounds of the cost curve are resampled.

        Args:
            costs: measured with the same target and drafter, as far as this K.
        """
        return self._speed(costs, self._rate)

    def oracle_speedup(self, costs: CostCurve) -> Estimate:
        """As `speedup`, for the best choice of every step's draft length, 0..K, by one who knows
        how many tokens the step would accept: no rule that chooses draft lengths can be faster.
        """
        return self._speed(costs, self._oracle_rate)

    def _rate(self, sums: np.ndarray, ms: np.ndarray) -> np.ndarray:
        """Tokens per millisecond."""
        return (1 + sums[..., 2] / sums[..., 0]) / ms[..., self.num_draft_tokens]

    def _oracle_rate(self, sums: np.ndarray, ms: np.ndarray) -> np.ndarray:
        """Dinkelbach's iteration: at a given rate the best length of a step is that of the largest
        tokens - rate * ms, and the rate of these choices is never lower.
        """
        at_least = sums[..., 3 : 3 + self.num_draft_tokens] / sums[..., :1]
        shares = -np.diff(at_least, prepend=1.0, append=0.0)  # [..., K + 1] of exactly 0..K
        lengths = np.arange(self.num_draft_tokens + 1)
        tokens = 1 + np.minimum(lengths[:, None], lengths)  # [accepted, drafted]
        rate, last = self._rate(sums, ms), None
        while last is None or (rate > last).any():
            last = rate
            chosen = (tokens - rate[..., None, None] * ms[..., None, :]).argmax(axis=-1)
            emitted = 1 + np.minimum(lengths, chosen)
            taken = np.take_along_axis(np.broadcast_to(ms, chosen.shape), chosen, axis=-1)
            rate = (shares * emitted).sum(axis=-1) / (shares * taken).sum(axis=-1)
            rate = np.maximum(rate, last)  # equal up to rounding at the end
        return rate

    def _speed(self, costs: CostCurve, rate) -> Estimate:
        def ratio(rows: np.ndarray, rounds: np.ndarray) -> np.ndarray:
            plain, ms = costs.medians(self.num_draft_tokens, rounds)
            return (rate(rows @ self.totals, ms) * plain)[:, None]

        sizes = len(self.totals), len(costs.plain_ms)
        return resampled(ratio, sizes, level=self.level, unit="text")[0]

    def tables(self) -> list[Table]:
        """Of all steps and, where anything was drafted, by position."""
        found, k = self.estimates, self.num_draft_tokens
        figures = [format(found[name], ".2f") for name in ("acceptance_length", "acceptance_rate")]
        header = ["sampler", "K", "texts", "acceptance length", "acceptance rate"]
        cells = [self.sampler, str(k), str(len(self.totals)), *figures]
        intervals = f"{100 * self.level:g} % bootstrap intervals over texts"
        note = f"Replayed; {found['acceptance_length'].note or intervals}."
        positions = rates_by_position(found, self.totals[:, 3 + k :].sum(axis=0))
        return [Table(header, [cells], (note,)), *[positions][: k > 0]]

    def records(self) -> list[dict[str, Any]]:
        """One per text: expected counts."""
        about = {"sampler": self.sampler, "num_draft_tokens": self.num_draft_tokens}
        names = ("steps", "drafted", "accepted")
        return [
            {**about, "text": number, **dict(zip(names, map(float, counts), strict=False))}
            for number, counts in enumerate(self.totals)
        ]

    def __str__(self) -> str:
        length, rate = self.acceptance_length, self.estimates["acceptance_rate"]
        how = f"replayed; {length.note}" if length.note else "replayed"
        return (
            f"K = {self.num_draft_tokens}, {self.sampler}: acceptance length "
            f"{length:.2f}, rate {rate:.2f} ({how})"
        )


def replay(traces: Trace | Iterable[Trace], *, num_draft_tokens: int, sampler: Sampler) -> Replay:
    """Expected acceptance on the same texts with another draft length or sampler.

    A drafter's first proposals must not depend on how many more it will draft. This holds for
    drafters that draft token by token or with causal attention. It does not for
    `PromptLookupDrafter`, which prefers matches with K tokens after them: make its trace at the K
    in question.

    Args:
        traces: from `every_position`.
        num_draft_tokens: K, at most that of the traces.
        sampler: a `RejectionSampler` or a `BlockSampler`.

    Raises:
        TypeError: another sampler.
        ValueError: a trace that holds only the roots of its own run, a larger K, or texts that
            are shorter than K.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> import torch
        >>> target = zoo.load_target()
        >>> generator = SpeculativeGenerator(target, zoo.load_drafter("model", target))
        >>> options = dict(max_new_tokens=12, do_sample=True, seed=0, trace=True)
        >>> trace = generator.generate(torch.tensor([[7, 8, 9]]), **options).trace
        >>> whole = every_position(generator, trace)
        >>> one, two = (replay(whole, num_draft_tokens=k, sampler=BlockSampler()) for k in (1, 2))
        >>> bool(one.acceptance_length.value <= two.acceptance_length.value)
        True

    Reference: Leviathan et al., arXiv:2211.17192; Sun et al., arXiv:2403.10444.
    """
    rules = {RejectionSampler: _token_rule, BlockSampler: _block_rule}
    if type(sampler) not in rules:
        raise TypeError(
            "replay knows RejectionSampler() and BlockSampler(), whose text does not depend on "
            f"what was drafted, got {sampler!r}"
        )
    rule, rows = rules[type(sampler)], []
    for trace in [traces] if traces is None or isinstance(traces, Trace) else traces:
        _check(trace, num_draft_tokens)
        for steps, numbers in zip(trace.steps, trace.numbers, strict=True):
            if len(steps) > num_draft_tokens:
                rows.append(_read_row(rule, steps, numbers, num_draft_tokens))
    if not rows:
        raise ValueError(
            f"no text of the trace has more than {num_draft_tokens} tokens; trace longer texts"
        )
    totals = np.array([_row_totals(*row) for row in rows])
    return Replay(num_draft_tokens, type(sampler).__name__, totals)


def _check(trace: Trace, num_draft_tokens: int) -> None:
    if not isinstance(trace, Trace):
        raise TypeError(
            f"traces are of every_position(generator, trace), got {shown(trace)}; a result has a "
            "trace where generate(..., trace=True) was called"
        )
    if trace.about.get("roots") != "every":
        raise ValueError(
            "this trace holds the roots of its own run only, and a run with other settings has "
            "others; pass every_position(generator, trace)"
        )
    most = trace.about["num_draft_tokens"]
    advice = "the trace drafted no more at every root; give its drafter a larger one"
    check_integer("num_draft_tokens", num_draft_tokens, 0, most, advice=advice)


def _read_row(
    rule, steps: list[RowStep], numbers: list[StepNumbers], k: int
) -> tuple[np.ndarray, np.ndarray]:
    """At every root whose whole window lies in the text: the probability `[T, K + 1]` that 0..K
    tokens or more are accepted, and how many `[T]` are drafted.
    """
    text = [step.new_tokens[0] for step in steps]
    windows = len(text) - k + 1 if k else len(text)
    at_least, drafted = np.ones((windows, k + 1)), np.zeros(windows)
    for root, (step, their) in enumerate(zip(steps[:windows], numbers, strict=False)):
        ratios = np.zeros(k)
        for i, token in enumerate(step.draft_tokens[:k]):
            if token != text[root + i]:
                break  # a deterministic proposal that the text does not follow
            if not their.target_probs[i] > 0:
                raise ValueError(
                    f"the target gives token {token} of the text probability 0, so it cannot have "
                    "written it; pass every_position the generator of the trace"
                )
            ratios[i] = their.draft_probs[i] / their.target_probs[i]
        at_least[root, 1:] = rule(ratios)
        drafted[root] = min(k, len(step.draft_tokens))
    return at_least, drafted


def _row_totals(at_least: np.ndarray, drafted: np.ndarray) -> np.ndarray:
    """`[3 + 2 K]` of `Replay.totals`."""
    visits, k = _visits(at_least), at_least.shape[1] - 1
    accepted_at = visits @ at_least[:, 1:]
    is_drafted = drafted[:, None] > np.arange(k)
    reached_at = visits @ (at_least[:, :-1] * is_drafted)
    sums = [visits.sum(), visits @ drafted, accepted_at.sum()]
    return np.concatenate([sums, accepted_at, reached_at])


def _visits(at_least: np.ndarray) -> np.ndarray:
    """`[T]`: the probability that each token of the text is a root."""
    count, width = at_least.shape
    exactly = at_least - np.pad(at_least[:, 1:], ((0, 0), (0, 1)))  # P(n accepted | text)
    visits = np.zeros(count + width)
    visits[0] = 1.0
    for root in range(count):
        visits[root + 1 : root + 1 + width] += visits[root] * exactly[root]
    return visits[:count]


def _token_rule(ratios: np.ndarray) -> np.ndarray:
    """`[K]`: the probability that 1..K tokens or more are accepted, given the text."""
    return np.minimum(ratios, 1.0).cumprod()


def _block_rule(ratios: np.ndarray) -> np.ndarray:
    """As `_token_rule`, of the block rule."""
    return np.minimum(np.minimum.accumulate(ratios.cumprod()), 1.0) if len(ratios) else ratios


def every_position(generator: SpeculativeGenerator, trace: Trace) -> Trace:
    """Reads the texts of a trace once more, with a root at every token.

    Costs one step per token, and so about what plain decoding costs with K draft tokens beside it.

    Args:
        generator: whose target wrote the text; its drafter's K bounds the K of a replay. Its
            sampler does not matter.
        trace: of any run (`generate(..., trace=True)`), also of a target that has been given
            another `generation_config` since: what tokens were drawn from is in the trace.

    Returns:
        A trace of the same texts whose steps all emit one token. Draft tokens are the text's, but
        for deterministic proposals, which are the drafter's own. Drafts end with the text.

    Raises:
        ValueError: the run passed logits processors (a trace has their names only), the
            generator's target writes another text, or its drafter drafts trees.

    Example:
        >>> import torch
        >>> from specdec.lab import zoo
        >>> target = zoo.load_target()
        >>> drafter = zoo.load_drafter("model", target, num_draft_tokens=3)
        >>> generator = SpeculativeGenerator(target, drafter)
        >>> options = dict(max_new_tokens=8, do_sample=True, seed=0, trace=True)
        >>> trace = generator.generate(torch.tensor([[7, 8, 9]]), **options).trace
        >>> [len(step.draft_tokens) for step in every_position(generator, trace)[0]]
        [3, 3, 3, 3, 3, 3, 2, 1]
    """
    if not isinstance(trace, Trace):
        raise TypeError(
            f"trace must be a Trace, got {shown(trace)}; pass generate(..., trace=True).trace"
        )
    if "sampling" not in trace.about:
        raise ValueError("the trace does not say what its tokens were drawn from; generate it anew")
    _refuse_trees(generator.drafter)
    sampling = Sampling(**trace.about["sampling"])
    options = sampling.options()
    rows = len(trace)
    is_greedy = LogitsFilter(rows, **sampling.logits_filter).is_greedy
    texts = [[token for step in row for token in step.new_tokens] for row in trace]
    lengths = [len(text) for text in texts]
    if not any(lengths):
        raise ValueError("the trace holds no new tokens")
    device = generator.target.device
    whole = [[*prompt, *text] for prompt, text in zip(trace.prompts, texts, strict=True)]
    sampler = _OneToken() if is_greedy else GivenText(whole, device, drafts_text=True)
    reader = SpeculativeGenerator(
        generator.target,
        generator.drafter,
        sampler,
        prefill_chunk_size=generator.prefill_chunk_size,
    )
    if not is_greedy:  # rows are named by their seeds, by which their noise finds their text
        options["seed"] = list(range(rows))
    inputs = left_padded(trace.prompts, device)
    read = reader.generate(*inputs, max_new_tokens=max(lengths), trace=True, **options).trace
    steps, numbers = [], []
    for row, text in enumerate(texts):
        if text != [step.new_tokens[0] for step in read.steps[row][: len(text)]]:
            raise ValueError(
                f"the generator's target does not write the text of row {row}; pass the generator "
                "of the trace"
            )
        left = range(len(text), 0, -1)  # tokens of the text, with which drafts end
        pairs = zip(left, read.steps[row], read.numbers[row], strict=False)
        kept = [_cut(step, their, min(len(step.draft_tokens), n)) for n, step, their in pairs]
        steps.append([step for step, _ in kept])
        numbers.append([their for _, their in kept])
    about = {**trace.about, "roots": "every", "sampler": None}
    about["num_draft_tokens"] = read.about["num_draft_tokens"]
    return Trace(steps, numbers, read.times, trace.prompts, about, trace.tokenizer)


def _refuse_trees(drafter: Drafter) -> None:
    if drafter.tree_depth is not None:
        raise ValueError(
            f"a replay reads chains, and {type(drafter).__name__} drafts trees; pass a generator "
            "whose drafter has no tree"
        )


class _OneToken(Sampler):
    """Commits one token per step. Greedy texts are written again by target and drafter
    themselves.
    """

    lossless = True
    uses_accept_draws = False

    def accept(
        self, draft: Draft, target_logits: Tensor, logits_filter: LogitsFilter, noise: Any
    ) -> Verdict:
        """Not called: all rows are greedy."""
        raise AssertionError("a sampled text is read by GivenText")

    def accept_greedily(self, draft: Draft, target_logits: Tensor) -> Verdict:
        """The target's token."""
        return emit(target_logits[:, :1].argmax(dim=-1), draft)


def _cut(step: RowStep, numbers: StepNumbers, count: int) -> tuple[RowStep, StepNumbers]:
    """A step of a chain with so many draft tokens."""
    names = ("draft_probs", "target_probs", "draft_entropies")
    shorter = {name: getattr(numbers, name)[:count] for name in names}
    entropies = numbers.target_entropies[: count + 1]
    shorter_step = replace(step, draft_tokens=step.draft_tokens[:count], parents=None)
    return shorter_step, replace(numbers, **shorter, target_entropies=entropies)
