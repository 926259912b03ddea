"""`plan_lengths`: which K, at which batch size, for a pair of one's own.

Legend: n batches, B rows, r rounds, R resamples, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from specdec.evaluation.anchors import with_draft_length
from specdec.evaluation.compare import compare
from specdec.evaluation.costs import CostCurve, measure_costs
from specdec.evaluation.evaluate import evaluate, timed
from specdec.evaluation.intervals import LEVEL, NUM_RESAMPLES, Estimate, counted, with_intervals
from specdec.evaluation.prompts import Prompt, as_prompts, encode
from specdec.generator import SpeculativeGenerator
from specdec.loop.lengths import lengths_to_measure
from specdec.request.prompts import left_padded
from specdec.show.table import Table, Tabular


@dataclass(frozen=True, eq=False, repr=False)
class LengthPlan(Tabular):
    """Speed over plain decoding by (rows, K).

    Args:
        predicted: from counted steps and the time of a step.
        measured: of the K of the largest prediction at each batch size.
        notes: of the times that predictions were made with.
    """

    predicted: dict[tuple[int, int], Estimate]
    measured: dict[tuple[int, int], Estimate]
    notes: tuple[str, ...] = ()

    def best(self, rows: int) -> int:
        """The K of the largest prediction."""
        values = {k: e.value for (b, k), e in self.predicted.items() if b == rows}
        return max(values, key=values.get)

    def tables(self) -> list[Table]:
        """A line for each batch size and K."""
        shown = [
            [str(b), str(k), f"{predicted:.2f}", f"{self.measured.get((b, k), '')}"]
            for (b, k), predicted in self.predicted.items()
        ]
        return [Table(["rows", "K", "predicted x plain", "measured x plain"], shown, self.notes)]

    def records(self) -> list[dict[str, Any]]:
        """One per batch size and K."""
        return [
            {"rows": b, "num_draft_tokens": k, "predicted": e.value, "is_best": k == self.best(b)}
            for (b, k), e in self.predicted.items()
        ]


def plan_lengths(
    generator: SpeculativeGenerator,
    prompts: Iterable[str | Prompt | Sequence[int]],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch_sizes: Sequence[int] = (1, 8),
    temperature: float = 0.0,
    max_new_tokens: int = 64,
    rounds: int = 5,
    progress: bool = False,
) -> LengthPlan:
    """Predicts how fast each K is at each batch size, and measures the best ones.

    The prompts are generated from at every K, and their steps counted; then plain steps and steps
    of every K are timed, with one row and with each batch size. The prediction is the time of the
    counted steps, with as many rows as have not ended, and of reading the prompts. `compare`
    measures whole generations.

    Args:
        generator: its drafter's K is the largest of interest.
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
    target, sampler = generator.target, generator.sampler
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    lengths = lengths_to_measure(generator.drafter.num_draft_tokens)[1:]
    run = partial(evaluate, generator, prompts, tokenizer=tokenizer, warmup=0, progress=progress)
    runs = {k: run(batch_size=max(batch_sizes), num_draft_tokens=k, **options) for k in lengths}
    ids = [encode(prompt, [], tokenizer) for prompt in prompts]
    plain = SpeculativeGenerator(target, None, sampler, graphs=generator.graphs)
    curves: dict[int, CostCurve] = {}
    predicted, measured, notes = {}, {}, []
    for rows in sorted({1, *batch_sizes}):
        inputs = left_padded(ids[:rows], target.device)
        timing = {"draft_lengths": lengths, "rounds": rounds, "temperature": temperature}
        curves[rows] = measure_costs(generator, *inputs, **timing)
        if rows not in batch_sizes:
            continue
        notes += [f"{counted(rows, 'row')}: {note}" for note in curves[rows].tables()[0].notes]
        reading = []
        for one in (plain, generator):
            start = partial(one.start, *inputs, max_new_tokens=max_new_tokens)
            reading.append(1e3 * np.median([timed(start, target.device)[1] for _ in range(3)]))
        for k in lengths:
            own = [[len(r.new_tokens), len(r.steps)] for r in runs[k].rows]
            times = [(curve.plain_ms, curve.step_ms[k]) for curve in (curves[1], curves[rows])]
            predicted[rows, k] = _speedup(np.array(own), rows, np.array(times), reading)
        k = LengthPlan(predicted, {}).best(rows)
        ours = with_draft_length(generator.drafter, k)
        ours = SpeculativeGenerator(target, ours, sampler, graphs=generator.graphs)
        contenders = {"plain": plain, "ours": ours}
        size = {"batch_size": rows, "rounds": rounds, "progress": progress}
        found = compare(contenders, prompts, tokenizer=tokenizer, **size, **options)
        measured[rows, k] = found.ratio("ours")
    return LengthPlan(predicted, measured, tuple(notes))


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
