"""`Study`: the evaluations of a grid of cells as one object: frame, tables, differences, the best
cells and figures.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from specdec.arguments import check_choice, shown
from specdec.atomic import write_text
from specdec.evaluation import plots
from specdec.evaluation.evaluation import SPEED_UNIT, Evaluation
from specdec.evaluation.intervals import MIN_CLUSTERS, Estimate, counted, holm
from specdec.evaluation.paired import difference, p_values, quotient, value_of
from specdec.show.table import Table, Tabular
from specdec.show.text import draft_size

Cell = dict[str, Any]
"""The value of every axis: `drafter`, `draft`, `sampler`, `temperature`, `proposal`,
`draft_temperature`, and those of one's own.
"""
DRAWING = ("proposal", "draft_temperature")
"""Axes of how drafters draw."""
CHOICES = ("drafter", "draft", "sampler", *DRAWING)
"""Axes of what is chosen; the others say under which conditions, and cells of other conditions are
not ranked against each other.
"""
_FIGURES = {
    "acceptance_length": ".2f",
    "acceptance_rate": ".3f",
    "block_efficiency": ".2f",
    "ms_per_token": ".2f",
    "tokens_per_second": ".0f",
}
"""What can be shown of a cell, with its format."""
_CONTENTS = "study.json"


@dataclass(frozen=True)
class Line:
    """Cells that differ in one axis only.

    Args:
        labels: values by axis; several, where their cells are one run.
        runs: by value of the axis.
    """

    labels: dict[str, list[Any]]
    runs: dict[Any, Evaluation]


@dataclass(frozen=True, eq=False, repr=False)
class Study(Tabular):
    """What `sweep` measured.

    Args:
        cells: the value of every axis.
        runs: the evaluation of each cell; cells that are one rule have the same one.
        timed: cells took turns on the same batches, so that their times compare.
        missing: cells that have not run to their end, and are left out.

    Example:
        >>> from specdec.evaluation import sweep
        >>> study = sweep(drafters=["lookup"], drafts=[1, 2], limit=2, max_new_tokens=4)
        >>> study.table().header
        ['drafter', 'K = 1', 'K = 2']
        >>> [cell["draft"] for cell in study.where(draft=2).cells]
        [2]
    """

    cells: list[Cell]
    runs: list[Evaluation]
    timed: bool = False
    missing: int = 0

    def __post_init__(self):
        keys = [tuple(sorted(cell.items(), key=str)) for cell in self.cells]
        if len(keys) != len(self.runs) or len(set(keys)) < len(keys):
            raise ValueError(
                f"a study needs a run of each cell and no cell twice, got {len(keys)} cells, "
                f"{len(set(keys))} of them different, and {len(self.runs)} runs"
            )

    @cached_property
    def axes(self) -> dict[str, list[Any]]:
        """The values of every axis, in their order."""
        names = dict.fromkeys(name for cell in self.cells for name in cell)
        return {n: list(dict.fromkeys(cell.get(n) for cell in self.cells)) for n in names}

    def where(self, **axes: Any) -> Study:
        """The cells with these values.

        Raises:
            ValueError: an axis or value that the study has not; lists those that it has.
        """
        for name, value in axes.items():
            check_choice("an axis", name, self.axes)
            check_choice(f"a value of {name}", value, self.axes[name])
        chosen = [i for i, cell in enumerate(self.cells) if axes.items() <= cell.items()]
        return Study([self.cells[i] for i in chosen], [self.runs[i] for i in chosen], self.timed)

    def run(self, **axes: Any) -> Evaluation:
        """The evaluation of the cell with these values.

        Raises:
            ValueError: there is none, or there are several that are not one run; names the axes to
                be fixed.
        """
        found = self.where(**axes)
        if len(set(map(id, found.runs))) != 1:
            open_axes = ", ".join(f"{n} {v}" for n, v in found._varying.items()) or "nothing more"
            raise ValueError(f"{axes} names {len(found.cells)} cells; say as well: {open_axes}")
        return found.runs[0]

    def difference(
        self, first: Mapping[str, Any], second: Mapping[str, Any], of: str = "acceptance_length"
    ) -> Estimate:
        """The number `of` a second cell minus that of a first one, paired over the prompts.

        Args:
            first, second: as for `run`.
            of: see `table`.
        """
        return difference(self.run(**first), self.run(**second), of)

    def ratio(
        self, first: Mapping[str, Any], second: Mapping[str, Any], of: str = "tokens_per_second"
    ) -> Estimate:
        """The number `of` a second cell divided by that of a first one, paired likewise: the
        speed-up.
        """
        return quotient(self.run(**first), self.run(**second), of)

    def best(self, of: str | None = None, **axes: Any) -> Study:
        """The cell of the best number, and those which it cannot be told apart from.

        All cells are judged at once: however many there are, a cell that is as good as the best one
        is left out with a probability of 5 % at most (`level` of the runs). So fewer than 6 prompts
        leave none out, and a cell may be kept whose own difference to the best excludes 0.
        Acceptance is paired over prompts, speed over batches; Holm's procedure over all pairs of
        cells.

        Args:
            of: see `table`.
            axes: the conditions, `temperature=1.0` for instance.

        Returns:
            These cells, the best first; those whose number is not known come last.

        Raises:
            ValueError: cells of several conditions are left, among which there is no best one.
        """
        of, found = self._figure(of), self.where(**axes)
        if conditions := {n: v for n, v in found._varying.items() if n not in CHOICES}:
            raise ValueError(f"no cell is the best of several conditions; say which: {conditions}")
        runs = [found.runs[i] for i in found._distinct]
        runs.sort(key=lambda run: _rank(run, of))
        places = np.triu_indices(len(runs), 1)
        held = np.ones((len(runs), len(runs)))
        held[places] = holm(p_values(runs, of)[places])
        ahead = [r for r, p in zip(runs, held[0], strict=True) if p > 1 - r.level]
        pairs = list(zip(found.cells, found.runs, strict=True))
        kept = [(cell, r) for run in ahead for cell, r in pairs if r is run]
        return Study([cell for cell, _ in kept], [run for _, run in kept], self.timed)

    def table(
        self,
        columns: str | None = None,
        of: str | None = None,
        *,
        minus: Mapping[str, Any] | None = None,
        over: Mapping[str, Any] | None = None,
    ) -> Table:
        """A column for each value of an axis, a line for all others. Bold is what is shown to be
        better than every other cell of its column and conditions, by paired tests that hold for all
        columns together (Holm). An interval is of its cell, or its difference, alone.

        Args:
            columns: an axis; by default the lengths of drafts, if there are several or nothing
                else but drafters, else the last axis of several values.
            of: `"acceptance_length"`, `"acceptance_rate"`, `"block_efficiency"`, `"ms_per_token"`
                (of a batch, prompts included) or `"tokens_per_second"`; by default the first, of
                timed studies the fourth.
            minus: values of axes: shows the difference to the cell which has these and is alike
                otherwise.
            over: likewise, the ratio to that cell; of `"tokens_per_second"` by default.
        """
        columns, base = self._axis(columns), minus or over
        of = "tokens_per_second" if over and of is None else self._figure(of)
        spec = ".2f" if over else "+" * bool(minus) + _FIGURES[of]
        contrast = quotient if over else difference
        best = () if base else set(map(id, self._best_of_columns(columns, of)))

        def shown(run: Evaluation | None) -> str:
            if run is None or not base:
                return "" if run is None else format(run.estimates[of], spec)
            other = self._counterpart(run, base)
            return "" if other in (None, run) else format(contrast(other, run, of), spec)

        lines, values = self.lines(columns), self.axes[columns]
        labels, rows, bold = list(lines[0].labels), [], set()
        for r, line in enumerate(lines):
            names = [self._joined(name, those) for name, those in line.labels.items()]
            runs = [line.runs.get(value) for value in values]
            names[-1] += " (lossy)" * any(run is not None and run.lossy for run in runs)
            rows.append([*names, *map(shown, runs)])
            bold |= {(r, len(labels) + i) for i, run in enumerate(runs) if id(run) in best}
        title = of.replace("_", " ")
        if base:
            named = ", ".join(_label(name, value) for name, value in base.items())
            title += f", {'minus' if minus else 'over'} that of {named}"
        header = [name.replace("_", " ") for name in labels] + [_label(columns, v) for v in values]
        return Table(header, rows, self._notes(title, of), frozenset(bold), labels=len(labels))

    def lines(self, columns: str) -> list[Line]:
        """The study along an axis, conditions first. Lines whose runs are the same ones are one,
        with all labels.
        """
        names = [n for n in self._varying if n != columns] or ["drafter"]
        names = [n for n in sorted(names, key=CHOICES.__contains__) if n != columns]
        found: dict[tuple, dict[Any, Evaluation]] = {}
        for cell, run in zip(self.cells, self.runs, strict=True):
            found.setdefault(tuple(cell.get(n) for n in names), {})[cell.get(columns)] = run
        alike: dict[tuple, list[tuple]] = {}
        places = [{v: i for i, v in enumerate(self.axes[n])} for n in names]
        for key in sorted(found, key=lambda key: [p[v] for p, v in zip(places, key, strict=True)]):
            runs = tuple((x, id(run)) for x, run in found[key].items())
            alike.setdefault(runs, []).append(key)
        return [
            Line(
                {n: list(dict.fromkeys(key[i] for key in keys)) for i, n in enumerate(names)},
                found[keys[0]],
            )
            for keys in alike.values()
        ]

    def ranked(self, of: str | None = None) -> dict[str, Estimate]:
        """The number of every run, the best first, by what is particular to it."""
        of, cells = self._figure(of), {}
        for cell, run in zip(self.cells, self.runs, strict=True):
            cells.setdefault(id(run), []).append(cell)
        found = {}
        for i in sorted(self._distinct, key=lambda i: _rank(self.runs[i], of)):
            every = cells[id(self.runs[i])]
            labels = {n: list(dict.fromkeys(c.get(n) for c in every)) for n in self.axes}
            lossy = " (lossy)" if self.runs[i].lossy else ""
            found[self.name_of(labels) + lossy] = self.runs[i].estimates[of]
        return found

    def name_of(self, labels: Mapping[str, list[Any]]) -> str:
        """What tells cells from others: their values in the axes where they have not all."""
        parts = (
            self._joined(name, values)
            for name, values in labels.items()
            if name == "drafter" or set(values) != set(self.axes[name])
        )
        return ", ".join(parts)

    def plot(self, x: str | None = None, of: str | None = None, *, ax: Any = None) -> Any:
        """Draws a panel for each of the conditions: lines over an axis of numbers, else the cells
        in their order, each with its interval.

        Args:
            x: an axis, by default as `columns` of `table`; `"drafter"` ranks all cells.
            of: see `table`.
            ax: matplotlib axes for a study of one condition; new ones by default.

        Returns:
            The matplotlib figure.
        """
        x, of = self._axis(x), self._figure(of)
        conditions = [n for n in self._varying if n not in (*CHOICES, x)]
        panels: dict[str, Study] = {}
        for cell in self.cells:
            values = {n: cell[n] for n in conditions}
            title = ", ".join(_label(n, value) for n, value in values.items())
            panels.setdefault(title, self.where(**values))
        return plots.study(panels, x, of, ax=ax)

    def tables(self) -> list[Table]:
        """The acceptance lengths and, of a timed study, milliseconds per token; where each drafter
        has one cell, one table with both and with the speed over that of the first.
        """
        if self.timed and len(self.axes["drafter"]) == len(self.cells):
            return [self._speeds()]
        shown = ["acceptance_length", "ms_per_token"]
        return [self.table(of=of) for of in shown[: 1 + self.timed]]

    def _speeds(self) -> Table:
        first, rows = self.runs[0], []
        for name, run in zip(self.axes["drafter"], self.runs, strict=True):
            figures = [
                run.estimates["acceptance_length"].value,
                run.estimates["ms_per_token"].value,
            ]
            shown = ["" if math.isnan(figure) else f"{figure:.2f}" for figure in figures]
            rows.append([str(name), *shown, format(quotient(first, run), ".2f")])
        header = ["", "acceptance length", "ms per token", "speed-up"]
        title = f"speed-up over {self.axes['drafter'][0]}"
        return Table(header, rows, self._notes(title, "tokens_per_second"))

    def records(self) -> list[dict[str, Any]]:
        """One per cell: its axes, its numbers with their intervals, and in `same_as` the first cell
        of the same run.
        """
        first = {id(self.runs[i]): i for i in reversed(range(len(self.runs)))}
        lines = []
        for i, (cell, run) in enumerate(zip(self.cells, self.runs, strict=True)):
            same = None if first[id(run)] == i else first[id(run)]
            line = {**cell, "same_as": same, "prompts": len(run.stats_of_prompts)}
            for name in _FIGURES:
                found = run.estimates[name]
                line |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
            lines.append(line)
        return lines

    @classmethod
    def load(cls, folder: str | Path) -> Study:
        """Reads the finished cells of what `sweep(..., output=folder)` saved.

        Raises:
            ValueError: the folder holds no study, or no finished cell of one.
        """
        contents = StudyFolder(folder)
        pairs = contents.cells()
        paths = {file: contents.path / file for _, file in pairs}
        found = {file: Evaluation.load(path) for file, path in paths.items() if path.exists()}
        whole = [(cell, found[file]) for cell, file in pairs if file in found]
        whole = [(cell, run) for cell, run in whole if run.is_whole]
        if not whole:
            raise ValueError(f"{folder} holds no cell of a study that has run to its end")
        cells, runs = map(list, zip(*whole, strict=True))
        return cls(cells, runs, contents.read()["timed"], missing=len(pairs) - len(whole))

    @property
    def _varying(self) -> dict[str, list[Any]]:
        return {name: values for name, values in self.axes.items() if len(values) > 1}

    @property
    def _distinct(self) -> list[int]:
        """The first cell of every run."""
        seen: dict[int, int] = {}
        for i, run in enumerate(self.runs):
            seen.setdefault(id(run), i)
        return list(seen.values())

    def _axis(self, name: str | None) -> str:
        if name is not None:
            return check_choice("an axis", name, self.axes)
        others = [axis for axis in self._varying if axis != "drafter"]
        return "draft" if "draft" in others or not others else others[-1]

    def _figure(self, of: str | None) -> str:
        if of is None:
            return "ms_per_token" if self.timed else "acceptance_length"
        return check_choice("of", of, _FIGURES)

    def _best_of_columns(self, columns: str, of: str) -> Iterator[Evaluation]:
        """The runs that are better than all others of their column and conditions."""
        groups: dict[tuple, dict[int, Evaluation]] = {}
        for cell, run in zip(self.cells, self.runs, strict=True):
            key = tuple(cell.get(n) for n in self.axes if n not in CHOICES or n == columns)
            groups.setdefault(key, {})[id(run)] = run
        leaders, chances = [], []
        for group in groups.values():
            runs = sorted(group.values(), key=lambda run: _rank(run, of))
            if len(runs) > 1:  # the least certain of its differences counts
                leaders.append(runs[0])
                chances.append(p_values(runs, of)[0, 1:].max())
        held = zip(leaders, holm(chances), strict=True)
        return (run for run, p in held if p <= 1 - run.level)

    def _joined(self, axis: str, values: list[Any]) -> str:
        is_long = len(values) > 2 and len(values) == len(self.axes[axis])
        return "all" if is_long else ", ".join(_label(axis, value) for value in values)

    def _counterpart(self, run: Evaluation, axes: Mapping[str, Any]) -> Evaluation | None:
        """The run of the cell with these values that is like a run's in all others or, where there
        is none, the only one of its conditions.
        """
        self.where(**axes)  # refuses what the study has not
        own = self.cells[next(i for i, r in enumerate(self.runs) if r is run)] | dict(axes)
        conditions = {n: v for n, v in own.items() if n in axes or n not in CHOICES}
        for wanted in (own, conditions):
            pairs = zip(self.cells, self.runs, strict=True)
            found = {id(r): r for c, r in pairs if wanted.items() <= c.items()}
            if len(found) == 1:
                return next(iter(found.values()))
        return None

    def _notes(self, title: str, of: str) -> tuple[str, ...]:
        is_time = of in ("ms_per_token", "tokens_per_second")
        unit = SPEED_UNIT if is_time else "prompt"
        clusters = (r.separate_batches if is_time else r.stats_of_prompts for r in self.runs)
        fewest = min(map(len, clusters))
        intervals = f"{100 * self.runs[0].level:g} % intervals over {unit}{'e' * is_time}s"
        if fewest < MIN_CLUSTERS:
            intervals = f"no interval for {counted(fewest, unit)}, fewer than {MIN_CLUSTERS}"
        notes = [f"{title[0].upper()}{title[1:]}; {intervals}."]
        drafting = [run for run in self.runs if run.num_draft_tokens != 0]
        if again := len(drafting) - len(set(map(id, drafting))):
            notes.append(
                f"{again} of {len(self.cells)} cells are one rule with another cell and did not "
                "run again: they share its line, or its number."
            )
        if any(run.lossy for run in self.runs):
            notes.append("Lossy rules: their texts are not the target's.")
        if self.missing:
            notes.append(f"Not finished yet, and left out: {counted(self.missing, 'cell')}.")
        if unlike := self.unlike():
            notes.append(f"Greedy text differs from that of {unlike[0]}: {'; '.join(unlike[1:])}.")
        return tuple(notes)

    def unlike(self) -> list[str]:
        """The name of a greedy cell and those of the cells that have its conditions and another
        text; none where all texts are equal.
        """
        texts: dict[tuple, tuple[int, list]] = {}
        found: dict[int, list[int]] = {}
        for i in self._distinct:
            cell = self.cells[i]
            if cell["temperature"] == 0:
                key = tuple(cell.get(n) for n in self.axes if n not in CHOICES)
                own = [row.new_tokens for row in self.runs[i].rows]
                first, theirs = texts.setdefault(key, (i, own))
                if own != theirs:
                    found.setdefault(first, []).append(i)
        names = [self.name_of({n: [v] for n, v in cell.items()}) for cell in self.cells]
        return [names[i] for first, others in found.items() for i in (first, *others)]


class StudyFolder:
    """The files of a study: one per rule, and `study.json`, which says of which cells they are.

    Args:
        path: of the folder, which is made if it is not there.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def read(self) -> dict[str, Any]:
        """What the study is."""
        try:
            found = json.loads((self.path / _CONTENTS).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path} is no folder of a study: {error}") from error
        if not isinstance(found, dict) or not {"timed", "cells"} <= found.keys():
            raise ValueError(
                f"{self.path} is no folder of a study: its {_CONTENTS} says something else, "
                f"{shown(found)}"
            )
        return found

    def cells(self) -> list[tuple[Cell, str]]:
        """Every cell, and the name of its file."""
        return [(each["cell"], each["file"]) for each in self.read()["cells"]]

    def add(self, cells: Iterable[tuple[Cell, str]], *, timed: bool) -> None:
        """Writes down cells of a study that begins or goes on.

        Raises:
            ValueError: the folder's study was timed otherwise.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        known = self.cells() if (self.path / _CONTENTS).exists() else []
        if known and self.read()["timed"] is not timed:
            raise ValueError(
                f"{self.path} holds a study with timed={not timed}, whose times do not compare; "
                "choose another folder"
            )
        every = [*known, *(each for each in cells if each not in known)]
        content = {"timed": timed, "cells": [{"cell": c, "file": f} for c, f in every]}
        text = json.dumps(content, indent=1)
        write_text(self.path / _CONTENTS, text)


def file_of(rule: Cell) -> str:
    """The name of a cell's file.

    Example:
        >>> file_of({"drafter": "zoo:eagle3", "draft": "32x6", "temperature": 1.0, "top_p": 0.9})
        'zoo-eagle3_32x6_T=1_top_p=0.9.jsonl'
    """
    parts = []
    for name, value in rule.items():
        if value is not None:
            text = number(value) if isinstance(value, float) else str(value)
            text = text if name in CHOICES[:3] else f"{name}={text}"
            parts.append(re.sub(r"[^\w.=+]+", "-", text.replace("temperature=", "T="))[-60:])
    return "_".join(parts).lstrip("-.") + ".jsonl"  # no option of a command, and not hidden


def number(value: float) -> str:
    """As short as it can be told from other numbers.

    Example:
        >>> number(1.0), number(0.1234567)
        ('1', '0.1234567')
    """
    return short if float(short := f"{value:g}") == value else repr(value)


def _rank(run: Evaluation, of: str) -> float:
    """Smaller is better; what is not known comes last."""
    value = value_of(run, of)
    return math.inf if math.isnan(value) else value if of == "ms_per_token" else -value


def _label(axis: str, value: Any) -> str:
    if axis == "draft" and isinstance(value, int):
        return draft_size(value)
    if axis == "draft" and value is not None:
        return f"tree {value}"
    if axis == "temperature":
        return f"T = {number(value)}"
    if axis in CHOICES:
        return "own" if value is None else str(value)
    return f"{axis} = {value}"
