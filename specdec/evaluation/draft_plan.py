"""`plan_drafts`: which K, which tree, at which batch size, for a pair of one's own.

Legend: n batches, B rows, r rounds, R resamples, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from specdec.evaluation.compare import answer, compare
from specdec.evaluation.evaluate import evaluate, timed
from specdec.evaluation.intervals import LEVEL, NUM_RESAMPLES, Estimate, counted, with_intervals
from specdec.evaluation.plan import Plan
from specdec.evaluation.prompts import Prompt, as_prompts, encode
from specdec.generator import SpeculativeGenerator
from specdec.loop.lengths import lengths_to_measure, time_steps
from specdec.request.prompts import left_padded
from specdec.show.table import Table, Tabular
from specdec.show.text import draft_size


@dataclass(frozen=True, eq=False, repr=False)
class DraftPlan(Tabular):
    """Speed over plain decoding by (rows, draft), drafts as `draft_size` calls them.

    Args:
        predicted: from counted steps and the time of a step.
        measured: of the draft of the largest prediction at each batch size.
        step_ms: median time of a step; with the plain one under `None`.
    """

    predicted: dict[tuple[int, str], Estimate]
    measured: dict[tuple[int, str], Estimate]
    step_ms: dict[tuple[int, str | None], float]

    def best(self, rows: int) -> str:
        """The draft of the largest prediction."""
        values = {draft: e.value for (b, draft), e in self.predicted.items() if b == rows}
        return max(values, key=values.get)

    def tables(self) -> list[Table]:
        """A line for each batch size and draft."""
        shown = [
            [str(b), draft, f"{self.step_ms[b, draft]:.2f}", f"{predicted:.2f}", f"{measured}"]
            for (b, draft), predicted in self.predicted.items()
            for measured in [self.measured.get((b, draft), "")]
        ]
        plain = ", ".join(
            f"{ms:.2f} ms with {counted(b, 'row')}" for (b, d), ms in self.step_ms.items() if not d
        )
        header = ["rows", "draft", "ms per step", "predicted x plain", "measured x plain"]
        return [Table(header, shown, (f"A plain step takes {plain}.",))]

    def records(self) -> list[dict[str, Any]]:
        """One per batch size and draft."""
        return [
            {"rows": b, "draft": draft, "predicted": e.value, "is_best": draft == self.best(b)}
            for (b, draft), e in self.predicted.items()
        ]


def plan_drafts(
    generators: SpeculativeGenerator | Sequence[SpeculativeGenerator],
    prompts: Iterable[str | Prompt | Sequence[int]],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch_sizes: Sequence[int] = (1, 8),
    temperature: float = 0.0,
    max_new_tokens: int = 64,
    rounds: int = 5,
    progress: bool = False,
) -> DraftPlan:
    """Predicts how fast each draft is at each batch size, and measures the best ones.

    The prompts are generated from with every draft, and their steps counted; then plain steps and
    steps of every draft are timed, with one row and with each batch size. The prediction is the
    time of the counted steps, with as many rows as have not ended, and of reading the prompts.
    `compare` measures whole generations.

    Args:
        generators: of one target. The K of a drafter is the largest of interest, and so are the
            nodes of a drafter of trees.
        prompts: as in `evaluate`, at least as many as rows; first turns only.
        tokenizer: of the target, for texts.
        batch_sizes: rows.
        temperature: 0 is greedy.
        max_new_tokens: of each prompt.
        rounds: r, of every measurement.
        progress: shows bars on standard error.
    """
    prompts = [replace(p, turns=p.turns[:1], category="") for p in as_prompts(prompts)]
    if len(prompts) < max(batch_sizes):
        raise ValueError(
            f"batches of {max(batch_sizes)} rows need as many prompts, got {len(prompts)}"
        )
    if isinstance(generators, SpeculativeGenerator):
        generators = [generators]
    first = generators[0]
    plain = SpeculativeGenerator(first.target, None, first.sampler, graphs=first.graphs)
    drafts: dict[str, tuple[SpeculativeGenerator, int]] = {}
    for one in generators:
        for k in lengths_to_measure(one.drafter.num_draft_tokens)[1:]:
            drafts.setdefault(draft_size(k, one.drafter.tree_depth), (one, k))
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    shared = {"tokenizer": tokenizer, "progress": progress, **options}
    run = partial(evaluate, prompts=prompts, batch_size=max(batch_sizes), warmup=0, **shared)
    runs = {draft: run(one, num_draft_tokens=k) for draft, (one, k) in drafts.items()}
    ids = [encode(prompt, [], tokenizer) for prompt in prompts]
    reading, times = {}, {}
    for rows in {1, *batch_sizes}:
        reading[rows], times[rows] = _times(
            {None: (plain, 0)} | drafts, ids[:rows], rounds=rounds, **options
        )
    predicted, measured = {}, {}
    for rows in batch_sizes:
        for draft, found in runs.items():
            counts = [[len(row.new_tokens), len(row.steps)] for row in found.rows]
            steps = [[times[b][None], times[b][draft]] for b in (1, rows)]
            both = [reading[rows][name] for name in (None, draft)]
            predicted[rows, draft] = _speedup(np.array(counts), rows, np.array(steps), both)
        best = DraftPlan(predicted, {}, {}).best(rows)
        one, k = drafts[best]
        contenders = {"plain": plain, "ours": partial(answer, one, num_draft_tokens=k)}
        found = compare(contenders, prompts, batch_size=rows, rounds=rounds, **shared)
        measured[rows, best] = found.ratio("ours")
    medians = {(b, name): np.median(ms) for b in batch_sizes for name, ms in times[b].items()}
    return DraftPlan(predicted, measured, medians)


def _times(
    drafts: Mapping[str | None, tuple[SpeculativeGenerator, int]],
    ids: list[list[int]],
    *,
    rounds: int,
    max_new_tokens: int,
    temperature: float,
) -> tuple[dict[str | None, float], dict[str | None, list[float]]]:
    """Milliseconds of reading a batch of prompts, and of a step in each round, by draft."""
    sampling = Plan(1, temperature).sampling(list(range(len(ids))))
    reading, started = {}, {}
    for one in {one for one, _ in drafts.values()}:
        inputs = left_padded(ids, one.target.device)
        start = partial(one.start, *inputs, max_new_tokens=max_new_tokens, **sampling)
        found = [timed(start, one.target.device) for _ in range(3)]
        reading[one], started[one] = 1e3 * np.median([s for _, s in found]), found[-1][0]
    runs = {name: (started[one], k) for name, (one, k) in drafts.items()}
    steps = time_steps(runs, rounds=rounds, num_steps=16)
    return {name: reading[one] for name, (one, _) in drafts.items()}, steps


def _speedup(counts: np.ndarray, rows: int, times: np.ndarray, reading: list[float]) -> Estimate:
    """Of steps `[prompts, 2]`, plain ones and ours, that take `times` `[2, 2, r]` ms in a batch of
    one row and of all; and of `reading` a batch of prompts `[2]` ms.
    """
    groups = [counts[i : i + rows] for i in range(0, len(counts), rows)]
    active = np.zeros((len(groups), 2, rows))  # steps with 1, 2, ... rows
    for n, group in enumerate(groups):
        steps = np.sort(group, axis=0)[::-1]
        active[n, :, : len(group)] = -np.diff(steps, axis=0, append=0).T
    share = np.linspace(0, 1, rows)  # of the way from one row to all

    def speed(batches: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        one, many = np.median(times[:, :, chosen], axis=-1)  # [2, R]
        ms = one.T[..., None] * (1 - share) + many.T[..., None] * share  # [R, 2, B]
        total = (active[batches].sum(axis=1) * ms).sum(axis=-1) + len(groups) * np.array(reading)
        return total[:, 0] / total[:, 1]

    def resampled() -> np.ndarray:
        draws, count = np.random.default_rng(0), times.shape[-1]
        batches = draws.integers(0, len(groups), (NUM_RESAMPLES, len(groups)))
        return speed(batches, draws.integers(0, count, (NUM_RESAMPLES, count)))[:, None]

    value = speed(np.arange(len(groups))[None], np.arange(times.shape[-1])[None])
    return with_intervals(value, resampled, len(groups), LEVEL, "batch")[0]
