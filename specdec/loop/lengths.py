"""How much to draft: the length of the next step, chosen from what earlier steps accepted.

A text keeps the target's distribution where the length of a step is a function of what was emitted
and accepted before it: given that, its draws are still uniform. A choice that looks at a draw of
the step itself (its accept draws, what it would draft) changes the distribution; `certify` finds
it.

Legend: K draft tokens (nodes of a tree) at most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from transformers import StoppingCriteriaList

from specdec.arguments import check_integer
from specdec.loop.host import Generation, OutputCollector
from specdec.loop.new_storage import STORAGE_MULTIPLE
from specdec.loop.pool import signature_of
from specdec.loop.replay import NUM_EAGER
from specdec.loop.state import Parts, Signature, bucket_of_rows
from specdec.processes import agreed
from specdec.request.call import Request
from specdec.row_step import RowStep
from specdec.samplers import Sampler, draw_by_race

MsByLength = Mapping[int, Sequence[float]]
"""Milliseconds of a step by draft length, one of each measured round."""

MEMORY = 20
"""Steps after which a step's weight in the running acceptance has fallen to 1 / e."""
PRIOR_RATE, PRIOR_WEIGHT = 0.8, 2.0
"""What the first position is taken to accept before anything is known, and how many observations
that counts for.
"""
FEWEST_ROUNDS, SECONDS = 3, 2.0
"""Of a cost table that is measured at the first call of a size: more rounds while time is left."""
NEAR, WIDEST = 1.25, 16
"""Contexts up to `NEAR` times as long or as short share a cost table; those between two that are
known, one at most `WIDEST` times as long as the other, have costs between these two.
"""


class Acceptance:
    """Running acceptance of a call by draft position, pooled over its rows; earlier steps count
    less and less (`MEMORY`).

    The rate at position i is that of the drafts whose tokens before i were accepted; a tree's is
    that of its node i among all steps. What is not known of a position is taken from the position
    before, of which drafters accept at least as much, as a rule. Positions that no step reaches any
    more are forgotten likewise, so a longer draft is tried again now and then.

    Args:
        num_draft_tokens: K.
        is_tree: the drafts are trees.

    Example:
        >>> acceptance = Acceptance(3)
        >>> acceptance.update([RowStep([5, 6], 1, [5, 9])] * 30, num_draft_tokens=2)
        >>> [round(rate, 2) for rate in acceptance.rates]
        [0.99, 0.06, 0.06]
        >>> acceptance.tokens_per_step().round(2).tolist()
        [1.0, 1.99, 2.05, 2.05]
    """

    def __init__(self, num_draft_tokens: int, *, is_tree: bool = False):
        self._is_tree = is_tree
        self._accepted, self._reached = np.zeros((2, num_draft_tokens))

    def update(self, rows: Iterable[RowStep | None], num_draft_tokens: int) -> None:
        """Takes in a step.

        Args:
            rows: what it did; `None` for rows that had ended.
            num_draft_tokens: that were asked of the drafter. Tokens that it did not have count as
                rejected.
        """
        self._accepted *= math.exp(-1 / MEMORY)
        self._reached *= math.exp(-1 / MEMORY)
        for step in rows:
            if step is not None:
                most = num_draft_tokens if self._is_tree else step.num_accepted + 1
                self._reached[: min(most, num_draft_tokens)] += 1
                self._accepted[step.path] += 1

    @property
    def rates(self) -> list[float]:
        """Of positions 1..K."""
        rates, rate = [], PRIOR_RATE
        for accepted, reached in zip(self._accepted, self._reached, strict=True):
            rate = float((accepted + PRIOR_WEIGHT * rate) / (reached + PRIOR_WEIGHT))
            rates.append(rate)
        return rates

    def tokens_per_step(self) -> np.ndarray:
        """`[K + 1]` expected tokens per row of a step with 0..K draft tokens."""
        rates = np.array(self.rates)
        return 1 + np.concatenate([[0.0], (rates if self._is_tree else rates.cumprod()).cumsum()])


ChooseLength = Callable[[Acceptance, int, int], int]
"""(acceptance so far, rows, tokens of the longest) -> draft tokens of the next step, 0..K. A
function of these arguments alone keeps the text lossless. A memory of earlier calls does not: the
same seed may have come before, and with it the draws that are to come.
"""


class ChosenLengths:
    """Sets the draft length of each step of a call, by what its earlier steps accepted.

    Args:
        choose: the next length.
        num_draft_tokens: K.
        is_tree: the drafts are trees.
    """

    def __init__(self, choose: ChooseLength, num_draft_tokens: int, *, is_tree: bool):
        self._choose, self._most = choose, num_draft_tokens
        self._acceptance = Acceptance(num_draft_tokens, is_tree=is_tree)

    def set(self, generation: Generation, longest: int) -> None:
        """Before a step; `longest` is the length of the longest row."""
        chosen = self._choose(self._acceptance, generation.state.signature.batch_size, longest)
        what = "the number of draft tokens that draft_length returned"
        generation.num_draft_tokens = check_integer(what, chosen, 0, self._most)

    def note(self, rows: Iterable[RowStep | None], num_draft_tokens: int) -> None:
        """After a step, as of `Acceptance.update`."""
        self._acceptance.update(rows, num_draft_tokens)


class AutoLength:
    """Chooses the length of most expected tokens per millisecond, of those whose cost is known.

    Args:
        costs: by (rows, tokens of the longest), milliseconds of a step by draft length, a number
            for each round. Their medians count, drawn to a straight line as far as their noise
            explains that they lie beside it. Rows that are missing take the costs of the nearest;
            between two contexts costs are linear in the tokens, and beyond those of the nearest.

    Example:
        >>> choose = AutoLength({(1, 64): {0: [10.0], 2: [12.0], 6: [16.0]}})
        >>> acceptance = Acceptance(6)  # 0.8 at every position, before anything is known
        >>> choose(acceptance, 1, 100)
        6
        >>> acceptance.update([RowStep([5, 6, 7], 0, [9])] * 9, num_draft_tokens=3)
        >>> choose(acceptance, 1, 100)
        0
    """

    def __init__(self, costs: Mapping[tuple[int, int], MsByLength] | None = None):
        # Other threads may be reading them: both are replaced, never extended.
        self.costs: Mapping[tuple[int, int], MsByLength] = {}
        self._smoothed: Mapping[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        for (rows, tokens), times in (costs or {}).items():
            self.add(rows, tokens, times)

    def add(self, rows: int, tokens: int, times: MsByLength) -> None:
        """Takes in the costs of a size."""
        check_integer("the rows of costs", rows, 1)
        check_integer("the tokens of costs", tokens, 1)
        if (
            not times
            or min(times) < 0
            or not all(min(each, default=0) > 0 for each in times.values())
        ):
            raise ValueError(
                f"costs must be milliseconds above 0 by draft length, a number at least for each, "
                f"got {times!r}"
            )
        lengths = np.array(sorted(times))
        ms = _smoothed(lengths, [np.array(times[k]) for k in lengths])
        self.costs = {**self.costs, (rows, tokens): times}
        self._smoothed = {**self._smoothed, (rows, tokens): (lengths, ms)}

    def knows(self, rows: int, tokens: int) -> bool:
        """Whether costs were measured with so many rows and a context of about this length, or
        with a shorter and a longer one.
        """
        known = [t for r, t in self.costs if r == rows]
        below = max((t for t in known if t <= NEAR * tokens), default=0)
        above = min((t for t in known if t * NEAR >= tokens), default=math.inf)
        return below * WIDEST >= above

    def describe(self) -> Iterator[str]:
        """A line for each size: rows, tokens, and milliseconds by draft length."""
        for (rows, tokens), (lengths, ms) in self._smoothed.items():
            pairs = zip(lengths.tolist(), ms.tolist(), strict=True)
            yield f"{rows} x {tokens} tokens: {', '.join(f'{k}: {t:.2f}' for k, t in pairs)}"

    def __call__(self, acceptance: Acceptance, rows: int, tokens: int) -> int:
        """The length of the next step; see `ChooseLength`."""
        smoothed, expected = self._smoothed, acceptance.tokens_per_step()
        if not smoothed:
            raise ValueError(
                "no costs are known to choose by; pass AutoLength(costs), or draft_length='auto'"
            )

        nearest = min((r for r, _ in smoothed), key=lambda known: abs(math.log(known / rows)))
        lengths, ms = _between({t: of for (r, t), of in smoothed.items() if r == nearest}, tokens)
        is_possible = lengths < len(expected)
        if not is_possible.any():
            raise ValueError(
                f"costs are known of drafts of {lengths.min()} tokens and more, and the drafter "
                f"drafts at most {len(expected) - 1}; pass AutoLength the costs of shorter ones"
            )
        return int(lengths[np.argmax(expected[lengths[is_possible]] / ms[is_possible])])


def _between(
    known: Mapping[int, tuple[np.ndarray, np.ndarray]], tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draft lengths and their costs at a context, from those of the contexts around it: attention
    takes a time that grows with the tokens and hardly with the draft.
    """
    below = max((t for t in known if t <= tokens), default=min(known))
    above = min((t for t in known if t >= tokens), default=max(known))
    (lengths, ms), (others, later) = known[below], known[above]
    if not np.array_equal(lengths, others):  # of a caller who measured different ones
        return known[min(below, above, key=lambda t: abs(math.log(t / tokens)))]
    share = (tokens - below) / (above - below) if above > below else 0.0
    return lengths, ms + share * np.maximum(later - ms, 0)  # a longer text costs no less


def _smoothed(lengths: np.ndarray, times: list[np.ndarray]) -> np.ndarray:
    """Medians of the times of each length, less noise (see `AutoLength`): a step of one in the
    table would draw all choices to one side of it.
    """
    ms = np.array([np.median(each) for each in times])
    if len(lengths) > 2 and min(map(len, times)) > 1:
        noise = np.mean([np.pi / 2 * each.var(ddof=1) / len(each) for each in times])
        line = np.polyval(np.polyfit(lengths, ms, 1), lengths)
        beside = ((ms - line) ** 2).sum() / (len(lengths) - 2)
        ms += min(1.0, noise / max(beside, 1e-12)) * (line - ms)
    return np.maximum.accumulate(ms)  # a longer draft costs no less


def lengths_to_measure(num_draft_tokens: int) -> list[int]:
    """Draft lengths among which `AutoLength` chooses: all small ones, ever fewer large ones, and K.

    Example:
        >>> lengths_to_measure(20)
        [0, 1, 2, 3, 4, 6, 8, 12, 16, 20]
    """
    steps = [0, 1, *(size for i in range(1, 12) for size in (2**i, 3 * 2 ** (i - 1)))]
    return sorted({*(k for k in steps if k < num_draft_tokens), num_draft_tokens})


def check_seeds(seeds: list[int] | None, sampler: Sampler) -> None:
    """Raises `ValueError` for rows whose random numbers are each other's, in a call whose draft
    lengths are chosen.
    """
    seeds, is_coupled = seeds or [], sampler.draw_draft is draw_by_race
    if len(set(seeds)) < len(seeds) and not is_coupled:
        raise ValueError(
            "rows that share a seed share their random numbers, so what one row accepts tells "
            "which draws another one has yet to use, and draft lengths must not depend on "
            "those; pass one seed per row, or num_draft_tokens="
        )


class MeasuredLengths:
    """Chooses the draft lengths of a generator's calls by what their steps cost, which the first
    call of a kind and size measures. Any thread may use it.
    """

    def __init__(self):
        self._of: Mapping[Signature, AutoLength] = {}  # replaced, for other threads

    def chooser(
        self, signature: Signature, tokens: tuple[int, int], start: Callable[[], Generation]
    ) -> AutoLength:
        """What chooses for calls of a signature.

        Args:
            signature: of the call.
            tokens: of its longest row, at the beginning and at the end.
            start: begins a generation like it, to be timed at either where no costs of such a size
                are known.
        """
        key, rows = signature._replace(batch_size=0), bucket_of_rows(signature.batch_size)
        auto = self._of.get(key) or AutoLength()
        self._of = {**self._of, key: auto}
        sizes = sorted({max(count, STORAGE_MULTIPLE) for count in tokens})  # shorter cost the same
        sizes = [size for size in sizes if not auto.knows(rows, size)]
        if not sizes:
            return auto
        if sizes[-1] <= NEAR * sizes[0]:
            sizes = sizes[-1:]
        lengths, generation = lengths_to_measure(signature.num_draft_tokens), start()
        runs = {(t, k): Timed(generation, k, min(t, tokens[1])) for t in sizes for k in lengths}
        times = time_steps(runs)
        generation.close()
        for size in sizes:
            auto.add(rows, size, {k: times[size, k] for k in lengths})
        return auto

    def chooser_of(
        self,
        choose: ChooseLength | Literal["auto"],
        parts: Parts,
        request: Request,
        why_eager: str | None,
        begin: Callable[[Request], Generation],
    ) -> ChooseLength:
        """What chooses for a call: the caller's own, or by costs. Processors and criteria, host
        code of users, have no part in the costs.

        Raises:
            ValueError: rows share a seed.
        """
        check_seeds(request.seeds, parts.sampler)
        if choose != "auto":
            return choose
        signature = signature_of(parts, request, captures=why_eager is None)
        plain = replace(request, criteria=StoppingCriteriaList(), processors=())
        longest = max(request.lengths)
        tokens = longest, longest + request.max_new_tokens
        return self.chooser(signature, tokens, partial(begin, plain))

    def describe(self) -> Iterator[str]:
        """A line for each kind and size."""
        for signature, auto in self._of.items():
            how = "greedy" if signature.logits_filter[0] else "sampled"
            yield from (f"ms of a step by draft length, {how}, {line}" for line in auto.describe())


class Timed(NamedTuple):
    """What `time_steps` times.

    Args:
        generation: its rows are ended.
        num_draft_tokens: of its steps.
        tokens: that its longest row is to have, while the others have as many more or less than
            before: a step costs what it costs when texts are that long, whatever is in their slots.
            `None` leaves them as they are.
    """

    generation: Generation
    num_draft_tokens: int
    tokens: int | None = None

    def prepared(self) -> Generation:
        """The generation, at its draft length and context."""
        generation = self.generation
        generation.end_rows(generation.rows)
        generation.num_draft_tokens = self.num_draft_tokens
        if self.tokens is not None:
            more = self.tokens - int(generation.lengths.max())
            generation.state.buffer.root_position += more
        generation.synchronize()
        return generation


@torch.inference_mode()
def time_steps(
    runs: Mapping[Any, Timed], *, rounds: int | None = None, num_steps: int = 1
) -> dict[Any, list[float]]:
    """Milliseconds of a step of each run, in turn within each round, after steps that are not kept.
    All rows are ended first, so nothing is committed and no drafter remembers anything; a step
    costs what it costs otherwise. Of a target that is spread over processes the times are those of
    the first one, so that all of them choose the same lengths.

    Args:
        runs: by name, steps of a generation that was started for this alone.
        rounds: r; `None` is as many as `SECONDS` have, and `FEWEST_ROUNDS` at least.
        num_steps: timed together.
    """
    times: dict[Any, list[float]] = {name: [] for name in runs}
    # Of one thread of a CPU, the time that other programs take does not count.
    device = next(iter(runs.values())).generation.tokens.device
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if is_alone else time.perf_counter
    for run in runs.values():
        generation = run.prepared()
        for _ in range(NUM_EAGER + 1 if generation.state.signature.is_captured else 1):
            generation.run_step().fetch().read()
    started, round_ = time.perf_counter(), 0
    model = generation.parts.target.model
    while round_ < (rounds or FEWEST_ROUNDS) or (
        rounds is None and agreed(time.perf_counter() - started < SECONDS, model)
    ):
        for name in [*times][:: -1 if round_ % 2 else 1]:
            generation = runs[name].prepared()
            before, collector = clock(), OutputCollector(generation)
            for outcome in [generation.run_step().fetch() for _ in range(num_steps)]:
                collector.add(outcome)
            times[name].append(1e3 * (clock() - before) / num_steps)
        round_ += 1
    return agreed(times, model)
