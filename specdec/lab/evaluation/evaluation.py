"""`Evaluation`: what was measured, and every number that follows from it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from specdec.arguments import check_integer
from specdec.jsonl import naming_line
from specdec.lab.evaluation.intervals import (
    LEVEL,
    MIN_CLUSTERS,
    Estimate,
    bootstrap,
    counted,
    rate_estimates,
    rates_by_position,
    ratio,
)
from specdec.lab.evaluation.run_file import EvaluatedBatch, EvaluatedRow, RunFile
from specdec.lab.show.table import Table, Tabular
from specdec.row_step import RowStep
from specdec.settings import called, differences
from specdec.statistics import SpeculationStats

SPEED_UNIT = "separate batch"
"""What intervals of speed resample: `Evaluation.separate_batches`."""


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Tabular):
    """Texts that were generated, and every number that follows from them.

    Intervals of rates resample prompts (with all their turns and samples), intervals of speed
    resample batches, which are what the clock measures; batches with prompts in common, such as
    samples of one prompt, are taken together.

    Args:
        batches: what was generated, with its times; no row twice.
        num_draft_tokens: K; `None` where nothing is known of drafts, of other programs.
        about: models, plan, versions, hardware, data.
        level: of the intervals.

    Example:
        >>> from specdec import SpeculativeGenerator, evaluate, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), "lookup")
        >>> evaluation = evaluate(generator, [[7, 8, 9, 7, 8]], max_new_tokens=8)
        >>> evaluation.stats.emitted, evaluation.estimates["acceptance_length"].value >= 1
        ([8], True)
    """

    batches: list[EvaluatedBatch]
    num_draft_tokens: int | None
    about: dict[str, Any] = field(default_factory=dict)
    level: float = LEVEL

    def __post_init__(self):
        counts = Counter(row.key for row in self.rows)
        if twice := [key for key, count in counts.items() if count > 1]:
            prompt, turn, sample = twice[0]
            raise ValueError(
                f"{len(twice)} rows come twice, turn {turn} of sample {sample} of prompt "
                f"{prompt!r} for instance; pass each batch once"
            )

    @property
    def rows(self) -> list[EvaluatedRow]:
        """All rows, batch by batch."""
        return [row for batch in self.batches for row in batch.rows]

    @property
    def lossy(self) -> str | None:
        """The class and the thresholds of a sampler that is lossy, of sampled text; `None` for
        others.
        """
        run = self.about.get("run", {})
        sampler, is_greedy = run.get("sampler", {}), run.get("plan", {}).get("temperature") == 0
        is_lossy = not is_greedy and not sampler.get("lossless", True)
        return called(sampler) if is_lossy else None

    @property
    def is_whole(self) -> bool:
        """Whether a run that was saved has come to its end."""
        run, done = self.about["run"], {(row.prompt, row.sample) for row in self.rows}
        return len(done) == run["prompts"]["count"] * run["plan"]["samples"]

    @property
    def seconds(self) -> float:
        """Of wall-clock, reading the prompts included."""
        return sum(sum(batch.seconds) for batch in self.batches)

    @cached_property
    def stats(self) -> SpeculationStats:
        """Counts and rates."""
        return SpeculationStats([row.steps for row in self.rows], self.num_draft_tokens or 0)

    @cached_property
    def stats_of_prompts(self) -> dict[str, SpeculationStats]:
        """Those of each prompt, with all its turns and samples."""
        found: dict[str, list[list[RowStep]]] = {}
        for row in self.rows:
            found.setdefault(row.prompt, []).append(row.steps)
        sizes = {"num_draft_tokens": self.num_draft_tokens or 0, "depth": self.stats.depth}
        return {prompt: SpeculationStats(steps, **sizes) for prompt, steps in found.items()}

    @cached_property
    def separate_batches(self) -> list[list[EvaluatedBatch]]:
        """The batches, in groups without a prompt in common: samples of one prompt are together."""
        from scipy.sparse import coo_array  # on use, so that `import specdec` stays fast
        from scipy.sparse.csgraph import connected_components

        count, prompts = len(self.batches), {p: i for i, p in enumerate(self.stats_of_prompts)}
        pairs = {
            (b, count + prompts[r.prompt]) for b, own in enumerate(self.batches) for r in own.rows
        }
        size, links = count + len(prompts), tuple(np.array(sorted(pairs)).T)
        graph = coo_array((np.ones(len(pairs)), links), shape=(size, size))
        groups: dict[int, list[EvaluatedBatch]] = {}
        for label, batch in zip(connected_components(graph)[1], self.batches, strict=False):
            groups.setdefault(int(label), []).append(batch)
        return list(groups.values())

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens / seconds."""
        return sum(self.stats.emitted) / self.seconds if self.seconds else 0.0

    @property
    def acceptance_error(self) -> float:
        """Standard error of the acceptance length over the steps, as if these were independent;
        `estimates` has an interval that does not assume it.
        """
        accepted = [step.num_accepted for row in self.rows for step in row.steps]
        return float(np.std(accepted)) / len(accepted) ** 0.5 if accepted else 0.0

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """Every number with its interval: `acceptance_length`, `acceptance_rate`,
        `block_efficiency`, `conditional_rate_1..K`, `joint_rate_1..K`, `tokens_per_second` and
        `ms_per_token`, of all rows of a batch together, prompts included.
        """
        depth, level, counts = self.stats.depth, self.level, self.stats_of_prompts.values()
        totals = [
            [*map(sum, (c.steps, c.drafted, c.accepted)), *c.accepted_at, *c.reached_at]
            for c in counts
        ]
        emitted = [[sum(c.emitted), sum(c.steps)] for c in counts]
        times = [tokens_and_seconds(group) for group in self.separate_batches]
        (efficiency,) = bootstrap(emitted, ratio, level=level, unit="prompt")
        (speed,) = bootstrap(times, ratio, level=level, unit=SPEED_UNIT)
        taken = [[1e3 * seconds, tokens] for tokens, seconds in times]
        (per_token,) = bootstrap(taken, ratio, level=level, unit=SPEED_UNIT)
        rates = rate_estimates(totals, depth, level=level, unit="prompt")
        rates["block_efficiency"] = efficiency
        if self.num_draft_tokens is None:
            rates = dict.fromkeys(rates, Estimate(math.nan, level=level))
        return {**rates, "tokens_per_second": speed, "ms_per_token": per_token}

    @property
    def categories(self) -> dict[str, Evaluation]:
        """The evaluation of each category alone, in the order in which they come."""
        groups: dict[str, list[EvaluatedBatch]] = {}
        for batch in self.batches:
            groups.setdefault(batch.rows[0].category, []).append(batch)
        return {name: replace(self, batches=batches) for name, batches in groups.items()}

    def tables(self) -> list[Table]:
        """By category and, where anything was drafted, by position."""
        return [self.table(), self.positions()] if self.num_draft_tokens else [self.table()]

    def table(self) -> Table:
        """Acceptance and speed by category, with intervals."""
        parts = [*self.categories.items(), ("all", self)]  # a category may be called "all"
        rows, parts = [], parts if len(parts) > 2 else parts[1:]
        for name, part in parts:
            names = ("acceptance_length", "acceptance_rate", "block_efficiency")
            figures = [format(part.estimates[n], ".2f") for n in names]
            speed = format(part.estimates["tokens_per_second"], ".0f")
            rows.append([name or "none", str(part._num_prompts), *figures, speed])
        fewest, own = min(part._num_prompts for _, part in parts), self._num_prompts
        note = f"Brackets: {100 * self.level:g} % bootstrap intervals over prompts"
        note += f"; none for fewer than {MIN_CLUSTERS}." if fewest < MIN_CLUSTERS else "."
        if own < MIN_CLUSTERS:
            note = f"No interval: {counted(own, 'prompt')}, fewer than {MIN_CLUSTERS}."
        cut = sum(row.was_cut for row in self.rows)
        notes = (note, *[f"{cut} prompts were shortened from the left."][: cut > 0])
        notes += (
            (f"{self.lossy} is lossy: these are not the target's texts.",) if self.lossy else ()
        )
        header = ["category", "prompts", "acceptance length", "acceptance rate", "block efficiency"]
        return Table([*header, "tokens/s"], rows, notes)

    @property
    def _num_prompts(self) -> int:
        return len({row.prompt for row in self.rows})

    def positions(self) -> Table:
        """Acceptance by draft position, with intervals."""
        return rates_by_position(self.estimates, self.stats.reached_at)

    def against(self, other: Evaluation) -> Table:
        """Acceptance lengths of this run beside those of another one, by category. The note names
        all settings in which the runs differ, the chat template and its variables among them.
        """
        ours, theirs = self.categories, other.categories
        parts = [(name, part, theirs.get(name)) for name, part in ours.items() if len(ours) > 1]
        rows = [
            [name or "none", *(str(p.estimates["acceptance_length"]) if p else "" for p in pair)]
            for name, *pair in [*parts, ("all", self, other)]
        ]
        runs = (other.about.get("run", {}), self.about.get("run", {}))
        differing = ", ".join(differences(*runs)) or "nothing"
        return Table(["category", "here", "there"], rows, (f"The runs differ in {differing}.",))

    def records(self) -> list[dict[str, Any]]:
        """One per row: its prompt, counts and rates."""
        names = ("steps", "drafted", "accepted", "emitted", "acceptance_length", "acceptance_rate")
        lines = []
        for row in self.rows:
            figures = SpeculationStats([row.steps], self.num_draft_tokens or 0).to_dict()
            own = {n: figures[n][0] if isinstance(figures[n], list) else figures[n] for n in names}
            lines.append({**vars(row), **own})
        return lines

    @classmethod
    def load(cls, path: str | Path) -> Evaluation:
        """Reads a run that `evaluate(..., output=path)` saved, as far as it has come."""
        about, batches = RunFile(path).read()
        if not batches:
            raise ValueError(f"{path} holds no finished batch")
        with naming_line(Path(path), 1):
            k = about["run"]["drafter"]["num_draft_tokens"]
            check_integer("num_draft_tokens", k or 0, 0)
        return cls(batches, k, about)


def tokens_and_seconds(batches: list[EvaluatedBatch]) -> tuple[int, float]:
    """Of some batches together."""
    return sum(b.num_new_tokens for b in batches), sum(sum(b.seconds) for b in batches)
