"""`Evaluation`: what was measured, and every number that follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from specdec.arguments import check_fields, check_integer, check_number, check_type
from specdec.evaluation.intervals import LEVEL, MIN_CLUSTERS, Estimate, bootstrap, counted
from specdec.evaluation.tables import Table, Tabular
from specdec.results import RowStep, SpeculationStats
from specdec.settings import differences


@dataclass(frozen=True, eq=False)
class EvaluatedRow:
    """One turn of one prompt.

    Args:
        prompt: its id.
        category: of the prompt.
        turn: from 0.
        sample: from 0.
        num_prompt_tokens: that were read.
        was_cut: the prompt had more, and lost its first ones.
        finish_reason: `"eos"`, `"length"` or `"stop"`.
        seed: of the row; `None` for greedy text.
        steps: what happened.

    Raises:
        TypeError, ValueError: a field of another type, or out of range.
    """

    prompt: str
    category: str
    turn: int
    sample: int
    num_prompt_tokens: int
    was_cut: bool
    finish_reason: Literal["eos", "length", "stop"]
    seed: int | None
    steps: list[RowStep]

    def __post_init__(self):
        check_fields(self)
        for name, least in (("turn", 0), ("sample", 0), ("num_prompt_tokens", 1)):
            check_integer(name, getattr(self, name), least)
        if self.seed is not None:
            check_integer("seed", self.seed, 0, 2**64 - 1)

    @property
    def new_tokens(self) -> list[int]:
        """The text."""
        return [token for step in self.steps for token in step.new_tokens]


@dataclass(frozen=True, eq=False)
class EvaluatedBatch:
    """Rows that were generated together.

    Args:
        index: of the batch in the run.
        seconds: of wall-clock for each turn, reading the prompts included.
        rows: of all turns.
    """

    index: int
    seconds: list[float]
    rows: list[EvaluatedRow]

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; `from_dict` reads it."""
        rows = [
            {**vars(row), "steps": [list(vars(s).values()) for s in row.steps]} for row in self.rows
        ]
        return {"batch": self.index, "seconds": self.seconds, "rows": rows}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> EvaluatedBatch:
        """Reads what `to_dict` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        rows = []
        for row in saved["rows"]:
            steps = check_type("steps", row["steps"], list)
            rows.append(EvaluatedRow(**{**row, "steps": list(map(RowStep.from_saved, steps))}))
        check_integer("batch", saved["batch"], 0)
        for seconds in check_type("seconds", saved["seconds"], list[float]):
            check_number("seconds", seconds, 0)
        if not rows or len(saved["seconds"]) != len({row.turn for row in rows}):
            raise ValueError("expected rows, and seconds of each turn")
        return cls(saved["batch"], saved["seconds"], rows)


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Tabular):
    """Texts that were generated, and every number that follows from them.

    Intervals of rates resample prompts (with all their turns and samples), intervals of speed
    resample batches, which are what the clock measures.

    Args:
        batches: what was generated, with its times.
        num_draft_tokens: K.
        about: models, plan, versions, hardware, data.
        level: of the intervals.
    """

    batches: list[EvaluatedBatch]
    num_draft_tokens: int
    about: dict[str, Any] = field(default_factory=dict)
    level: float = LEVEL

    @property
    def rows(self) -> list[EvaluatedRow]:
        """All rows, batch by batch."""
        return [row for batch in self.batches for row in batch.rows]

    @property
    def seconds(self) -> float:
        """Of wall-clock, reading the prompts included."""
        return sum(sum(batch.seconds) for batch in self.batches)

    @cached_property
    def stats(self) -> SpeculationStats:
        """Counts and rates."""
        return SpeculationStats([row.steps for row in self.rows], self.num_draft_tokens)

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens / seconds."""
        return sum(self.stats.emitted) / self.seconds if self.seconds else 0.0

    @property
    def acceptance_error(self) -> float:
        """Standard error of the acceptance length over the steps, as if these were independent;
        `estimates` has an interval that does not assume it.
        """
        accepted = [float(step.num_accepted) for row in self.rows for step in row.steps]
        return torch.tensor(accepted).std(correction=0).item() / max(len(accepted), 1) ** 0.5

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """Every number with its interval: `acceptance_length`, `acceptance_rate`,
        `block_efficiency`, `conditional_rate_1..K`, `joint_rate_1..K`, `tokens_per_second`.
        """
        k = self.num_draft_tokens
        clusters: dict[str, list[list[RowStep]]] = {}
        for row in self.rows:
            clusters.setdefault(row.prompt, []).append(row.steps)
        totals = np.array([_counts(SpeculationStats(rows, k)) for rows in clusters.values()])
        names = ["acceptance_length", "acceptance_rate", "block_efficiency"]
        names += [f"conditional_rate_{i + 1}" for i in range(k)]
        names += [f"joint_rate_{i + 1}" for i in range(k)]
        rates = bootstrap(totals, lambda sums: _rates(sums, k), level=self.level, unit="prompt")
        times = np.array(
            [
                [sum(len(row.new_tokens) for row in batch.rows), sum(batch.seconds)]
                for batch in self.batches
            ]
        )
        (speed,) = bootstrap(
            times, lambda s: s[..., :1] / s[..., 1:], level=self.level, unit="batch"
        )
        return {**dict(zip(names, rates, strict=True)), "tokens_per_second": speed}

    @property
    def categories(self) -> dict[str, Evaluation]:
        """The evaluation of each category alone, in the order in which they come."""
        groups: dict[str, list[EvaluatedBatch]] = {}
        for batch in self.batches:
            groups.setdefault(batch.rows[0].category, []).append(batch)
        return {
            name: Evaluation(batches, self.num_draft_tokens, self.about, self.level)
            for name, batches in groups.items()
        }

    def tables(self) -> list[Table]:
        """By category and, where anything was drafted, by position."""
        return [self.table(), self.positions()] if self.num_draft_tokens else [self.table()]

    def table(self) -> Table:
        """Acceptance and speed by category, with intervals."""
        header = ["category", "prompts", "acceptance length", "acceptance rate", "block efficiency"]
        header += ["tokens/s"]
        categories = self.categories if len(self.categories) > 1 else {}
        parts = [*categories.items(), ("all", self)]
        cut = sum(row.was_cut for row in self.rows)
        notes = [self._interval_note([part for _, part in parts])]
        notes += [f"{cut} prompts were shortened from the left."] if cut else []
        return Table(header, [part._cells(name) for name, part in parts], tuple(notes))

    @property
    def _num_prompts(self) -> int:
        return len({row.prompt for row in self.rows})

    def _interval_note(self, parts: list[Evaluation]) -> str:
        """What brackets are, and which figures have none."""
        if self._num_prompts < MIN_CLUSTERS:
            prompts = counted(self._num_prompts, "prompt")
            return f"No interval: {prompts}, fewer than {MIN_CLUSTERS}."
        note = f"Brackets: {100 * self.level:g} % bootstrap intervals over prompts"
        if min(part._num_prompts for part in parts) < MIN_CLUSTERS:
            note += f"; none for fewer than {MIN_CLUSTERS}"
        return f"{note}."

    def _cells(self, name: str) -> list[str]:
        estimates = self.estimates
        names = ("acceptance_length", "acceptance_rate", "block_efficiency")
        figures = [format(estimates[n], ".2f") for n in names]
        speed = format(estimates["tokens_per_second"], ".0f")
        return [name or "none", str(self._num_prompts), *figures, speed]

    def positions(self) -> Table:
        """Acceptance by draft position, with intervals."""
        estimates, stats = self.estimates, self.stats
        rows = [
            [
                str(i + 1),
                str(stats.reached_at[i]),
                format(estimates[f"conditional_rate_{i + 1}"], ".2f"),
                format(estimates[f"joint_rate_{i + 1}"], ".2f"),
            ]
            for i in range(self.num_draft_tokens)
        ]
        return Table(["position", "reached", "conditional rate", "joint rate"], rows)

    def records(self) -> list[dict[str, Any]]:
        """One per row: its prompt, counts and rates."""
        lines = []
        for row in self.rows:
            stats = SpeculationStats([row.steps], self.num_draft_tokens)
            named = {name: value for name, value in vars(row).items() if name != "steps"}
            counts = {
                name: sum(getattr(stats, name)) for name in ("drafted", "accepted", "emitted")
            }
            rates = {
                name: getattr(stats, name) for name in ("acceptance_length", "acceptance_rate")
            }
            lines.append({**named, "steps": len(row.steps), **counts, **rates})
        return lines

    def __str__(self) -> str:
        return self.to_text()

    @classmethod
    def merged(cls, parts: Iterable[Evaluation]) -> Evaluation:
        """One evaluation of the shards of one run.

        Raises:
            TypeError: parts that are no evaluations.
            ValueError: no parts, parts of runs that differ (says in what), or a batch that two of
                them hold.
        """
        parts = list(parts)
        if not parts:
            raise ValueError("there is nothing to merge: pass the shards of a run")
        for part in parts:
            check_type("a part", part, Evaluation)
        for number, part in enumerate(parts[1:], start=1):
            differing = differences(parts[0]._run_without_shard(), part._run_without_shard())
            if differing:
                raise ValueError(
                    f"parts 0 and {number} are of different runs; they differ in "
                    f"{', '.join(differing)}"
                )
        batches = sorted((b for part in parts for b in part.batches), key=lambda b: b.index)
        indices = [batch.index for batch in batches]
        if len(set(indices)) < len(indices):
            raise ValueError(f"two parts hold the same batch: {indices}")
        return cls(batches, parts[0].num_draft_tokens, parts[0].about, parts[0].level)

    def _run_without_shard(self) -> dict[str, Any]:
        """What all shards of a run have in common."""
        run = {name: v for name, v in self.about.get("run", {}).items() if name != "shard"}
        return run or {"num_draft_tokens": self.num_draft_tokens}

    @classmethod
    def load(cls, path: str | Path) -> Evaluation:
        """Reads a run that `evaluate(..., output=path)` saved, as far as it has come.

        Raises:
            ValueError: another kind of file.
        """
        from specdec.evaluation.run_file import read_batches, read_lines

        header, lines, _ = read_lines(Path(path))
        if header is None or not lines:
            raise ValueError(f"{path} holds no finished batch")
        batches = sorted(read_batches(Path(path), lines), key=lambda batch: batch.index)
        about = {name: value for name, value in header.items() if name != "format"}
        drafter = about["run"].get("drafter")
        k = drafter.get("num_draft_tokens") if isinstance(drafter, dict) else None
        if not isinstance(k, int):
            raise ValueError(f"{path}, line 1 does not say how many tokens were drafted")
        return cls(batches, k, about)


def _counts(stats: SpeculationStats) -> list[int]:
    """Steps, drafted, accepted and emitted tokens, then accepted and reached at each position."""
    sums = [sum(counts) for counts in (stats.steps, stats.drafted, stats.accepted, stats.emitted)]
    return [*sums, *stats.accepted_at, *stats.reached_at]


def _rates(sums: np.ndarray, k: int) -> np.ndarray:
    """The rates of `results.py` from the sums of `_counts`; NaN where there is nothing to divide
    by.
    """
    steps, drafted, accepted, emitted = (sums[..., i] for i in range(4))
    accepted_at, reached_at = sums[..., 4 : 4 + k], sums[..., 4 + k :]

    def ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.divide(a, b, out=np.full(np.broadcast(a, b).shape, math.nan), where=b > 0)

    columns = [1 + ratio(accepted, steps), ratio(accepted, drafted), ratio(emitted, steps)]
    joint = ratio(accepted_at, np.broadcast_to(steps[..., None], accepted_at.shape))
    return np.concatenate([np.stack(columns, -1), ratio(accepted_at, reached_at), joint], axis=-1)
