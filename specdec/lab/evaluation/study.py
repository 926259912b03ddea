"""`Study`: the evaluations of a grid of cells as one object: a frame, differences, tests, the best
cells, a figure and a table for a paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specdec.arguments import check_choice
from specdec.lab.evaluation import plots
from specdec.lab.evaluation.cells import (
    CHOICES,
    FIGURES,
    Cell,
    StudyFolder,
    axes_of,
    called,
    partner_of,
    places_of,
)
from specdec.lab.evaluation.evaluation import Evaluation
from specdec.lab.evaluation.intervals import Estimate, counted, holm
from specdec.lab.evaluation.paired import difference, p_values, quotient, totals_of
from specdec.lab.evaluation.run_file import RunFile
from specdec.lab.evaluation.study_table import (
    provenance_of,
    rank,
    speed_table,
    study_table,
)
from specdec.lab.evaluation.swaps import PairedTest, PairedTests, swap_p_value
from specdec.lab.show.table import Table, Tabular

STARS = (0.05, 0.01, 0.001)
"""Levels of p-values, a star each."""


@dataclass(frozen=True, eq=False, repr=False)
class Study(Tabular):
    """What `sweep` measured.

    Args:
        cells: the value of every axis: `drafter`, `draft`, `sampler`, `temperature`, and what was
            varied.
        runs: the evaluation of each cell; cells that are one rule have the same one.
        timed: cells took turns on the same batches, so that their times compare.
        missing: cells that have not run to their end, and are left out.

    Example:
        >>> from specdec.lab.evaluation import sweep
        >>> study = sweep(drafters=["lookup"], drafts=[1, 2], limit=2, max_new_tokens=4)
        >>> frame = study.to_frame()  # one line per cell; line i is of study.runs[i]
        >>> lengths = frame.pivot(index="drafter", columns="draft", values="acceptance_length")
        >>> bool(lengths.loc["lookup", 2] >= lengths.loc["lookup", 1])
        True
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

    @classmethod
    def load(cls, folder: str | Path) -> Study:
        """Reads the finished cells of what `sweep(..., output=folder)` saved.

        Raises:
            ValueError: the folder holds no study, or no finished cell of one.
        """
        contents = StudyFolder(folder)
        cells, files, timed = contents.read()
        paths = {file: contents.path / file for file in files}
        begun = {file: path for file, path in paths.items() if RunFile(path).is_begun}
        found = {file: Evaluation.load(path) for file, path in begun.items()}
        whole = [
            (cell, found[file])
            for cell, file in zip(cells, files, strict=True)
            if file in found and found[file].is_whole
        ]
        if not whole:
            raise ValueError(f"{folder} holds no cell of a study that has run to its end")
        return cls(*map(list, zip(*whole, strict=True)), timed, missing=len(cells) - len(whole))

    def records(self) -> list[dict[str, Any]]:
        """One per cell: its axes, its numbers with their intervals, in `same_as` the first cell of
        the same run, and the device that ran it.
        """
        first = {id(self.runs[i]): i for i in reversed(range(len(self.runs)))}
        lines = []
        for i, (cell, run) in enumerate(zip(self.cells, self.runs, strict=True)):
            same = None if first[id(run)] == i else first[id(run)]
            line = {**cell, "same_as": same, "prompts": len(run.stats_of_prompts)}
            line["device"] = run.about.get("run", {}).get("device")
            for name in FIGURES:
                found = run.estimates[name]
                line |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
            lines.append(line)
        return lines

    def tables(
        self,
        columns: str | None = None,
        of: str | None = None,
        *,
        minus: Mapping[str, Any] | None = None,
        stars: Sequence[float] = STARS,
    ) -> list[Table]:
        """What is printed: without arguments the acceptance lengths and, of a timed study,
        milliseconds per token; where each drafter has one cell, one table with both and with the
        speed over that of the first.

        Args:
            columns, of, minus, stars: see `to_latex`.
        """
        if (columns, of, minus) == (None, None, None):
            if self.timed and len(axes_of(self.cells)["drafter"]) == len(self.cells):
                return [speed_table(self.cells, self.runs, self._notes)]
            shown = ["acceptance_length", "ms_per_token"][: 1 + self.timed]
        else:
            shown = [self._figure(of)]
        columns = self._axis(columns)
        return [
            study_table(
                self.cells,
                self.runs,
                columns,
                name,
                tests=self.test(minus, of=name) if minus else None,
                stars=stars,
                notes=self._notes,
            )
            for name in shown
        ]

    def to_latex(
        self,
        *,
        columns: str | None = None,
        of: str | None = None,
        minus: Mapping[str, Any] | None = None,
        stars: Sequence[float] = STARS,
        caption: str | None = None,
        label: str | None = None,
    ) -> str:
        r"""A table for a paper, which needs the package booktabs.

        Args:
            columns: the axis with a column for each value; by default the lengths of drafts, if
                there are several, else the last axis of several values.
            of: `"acceptance_length"`, `"acceptance_rate"`, `"block_efficiency"`, `"ms_per_token"`
                or `"tokens_per_second"`; by default the first, of timed studies the fourth.
            minus: values of axes: adds a column of differences to each, to the cell that has these
                values and is alike otherwise.
            stars: levels of the p-values of these differences (`test`), a star each.
            caption, label: of a `table` with them, with the notes below: prompts, seeds, hardware
                and commit. Without both a `tabular`, with the notes as comments.

        Example:
            >>> from specdec.lab.evaluation import sweep
            >>> study = sweep(drafters=["none", "lookup"], drafts=[2], limit=6, max_new_tokens=8)
            >>> text = study.to_latex(minus={"drafter": "none"}, caption="Lookup", label="tab:a")
            >>> r"\caption{Lookup}" in text and "label swaps" in text
            True
        """
        is_bare = caption is None and label is None
        of = of if is_bare else self._figure(of)  # a caption is of one table
        shown = self.tables(columns, of, minus=minus, stars=stars)
        if is_bare:
            return "\n\n".join(table.latex() for table in shown)
        table = replace(shown[0], notes=(*shown[0].notes, provenance_of(self.runs)))
        return table.latex(caption=caption or "", label=label)

    def difference(
        self, first: Mapping[str, Any], second: Mapping[str, Any], of: str = "acceptance_length"
    ) -> Estimate:
        """The number `of` a second cell minus that of a first one, paired over the prompts.

        Args:
            first, second: values of axes that one run alone has: `{"drafter": "lookup"}`.
            of: see `to_latex`.

        Raises:
            ValueError: there is no such cell, or several that are not one run; names the axes to be
                fixed.
        """
        return difference(self._run(first), self._run(second), of)

    def ratio(
        self, first: Mapping[str, Any], second: Mapping[str, Any], of: str = "tokens_per_second"
    ) -> Estimate:
        """The number `of` a second cell divided by that of a first one, paired likewise: the
        speed-up.
        """
        return quotient(self._run(first), self._run(second), of)

    def test(
        self,
        first: Mapping[str, Any],
        second: Mapping[str, Any] | None = None,
        of: str = "acceptance_length",
    ) -> PairedTests:
        """Whether second cells differ from first ones, by swaps of their labels within prompts.

        Exact up to 16 prompts (or separate batches, of times): all swaps are tried. All pairs hold
        together (Holm): if none differs, one is said to with a probability of 5 % at most where
        `adjusted` at most 0.05 counts.

        Args:
            first: values of axes, `{"drafter": "lookup"}`.
            second: likewise; every cell with these is tested against the cell that has `first` and
                is alike otherwise. All other cells by default.
            of: see `to_latex`.

        Raises:
            ValueError: no cells with these values, or none that are a pair.

        Example:
            >>> from specdec.lab.evaluation import sweep
            >>> study = sweep(drafters=["none", "lookup"], drafts=[4], limit=7, max_new_tokens=8)
            >>> (found,) = study.test({"drafter": "none"}, {"drafter": "lookup"}).tests
            >>> found.num_clusters, found.p_value >= 2 / 2**7
            (7, True)
        """
        check_choice("of", of, FIGURES)
        seen: dict[tuple[int, int], tuple[Cell, Evaluation, Evaluation]] = {}
        for i in places_of(self.cells, second or {}):
            one, other = partner_of(self.cells, self.runs, i, first), self.runs[i]
            if one is not None and one is not other:
                seen.setdefault((id(one), id(other)), (self.cells[i], one, other))
        if not seen:
            raise ValueError(
                f"no cell has a partner with {dict(first)} that is alike otherwise and another "
                "run; name values in which two cells alone differ"
            )
        tables = [totals_of([one, other], of) for _, one, other in seen.values()]
        differences = [difference(one, other, of) for _, one, other in seen.values()]
        chances = [
            1.0 if math.isnan(gap.value) else swap_p_value(table)
            for gap, table in zip(differences, tables, strict=True)
        ]
        found = [
            PairedTest(cell, gap, p, float(adjusted), len(table))
            for (cell, *_), gap, p, adjusted, table in zip(
                seen.values(), differences, chances, holm(chances), tables, strict=True
            )
        ]
        return PairedTests(found, of, dict(first))

    def best(self, of: str | None = None, **axes: Any) -> Study:
        """The cell of the best number, and those which it cannot be told apart from.

        All cells are judged at once: however many there are, a cell that is as good as the best one
        is left out with a probability of 5 % at most (`level` of the runs). So fewer than 6 prompts
        leave none out, and a cell may be kept whose own difference to the best excludes 0.
        Acceptance is paired over prompts, speed over batches; Holm's procedure over all pairs of
        cells.

        Args:
            of: see `to_latex`.
            axes: the conditions, `temperature=1.0` for instance.

        Returns:
            These cells, the best first; those whose number is not known come last.

        Raises:
            ValueError: cells of several conditions are left, among which there is no best one.
        """
        of, places = self._figure(of), places_of(self.cells, axes)
        cells = [self.cells[i] for i in places]
        if many := {n: v for n, v in axes_of(cells, least=2).items() if n not in CHOICES}:
            raise ValueError(f"no cell is the best of several conditions; say which: {many}")
        runs = list({id(self.runs[i]): self.runs[i] for i in places}.values())
        runs.sort(key=lambda run: rank(run, of))
        pairs = np.triu_indices(len(runs), 1)
        held = np.ones((len(runs), len(runs)))
        held[pairs] = holm(p_values(runs, of)[pairs])
        ahead = [r for r, p in zip(runs, held[0], strict=True) if p > 1 - r.level]
        kept = [i for run in ahead for i in places if self.runs[i] is run]
        return Study([self.cells[i] for i in kept], [self.runs[i] for i in kept], self.timed)

    def plot(self, x: str | None = None, of: str | None = None, *, ax: Any = None) -> Any:
        """Draws a panel for each of the conditions: lines over an axis of numbers, else the cells
        in their order, each with its interval.

        Args:
            x: an axis, by default as `columns` of `to_latex`; `"drafter"` ranks all cells.
            of: see `to_latex`.
            ax: matplotlib axes for a study of one condition; new ones by default.

        Returns:
            The matplotlib figure.
        """
        x, of = self._axis(x), self._figure(of)
        conditions = [n for n in axes_of(self.cells, least=2) if n not in (*CHOICES, x)]
        panels: dict[str, list[int]] = {}
        for i, cell in enumerate(self.cells):
            panels.setdefault(", ".join(called(n, cell[n]) for n in conditions), []).append(i)
        parts = {
            title: Study([self.cells[i] for i in own], [self.runs[i] for i in own], self.timed)
            for title, own in panels.items()
        }
        return plots.study(parts, x, of, ax=ax)

    def _run(self, wanted: Mapping[str, Any]) -> Evaluation:
        places = places_of(self.cells, wanted)
        if len({id(self.runs[i]) for i in places}) != 1:
            still = axes_of([self.cells[i] for i in places], least=2)
            still = ", ".join(f"{n} {v}" for n, v in still.items()) or "nothing more"
            raise ValueError(f"{dict(wanted)} names {len(places)} cells; say as well: {still}")
        return self.runs[places[0]]

    def _axis(self, name: str | None) -> str:
        axes = axes_of(self.cells)
        if name is not None:
            return check_choice("an axis", name, axes)
        others = [n for n, values in axes.items() if len(values) > 1 and n != "drafter"]
        return "draft" if "draft" in others or not others else others[-1]

    def _figure(self, of: str | None) -> str:
        if of is None:
            return "ms_per_token" if self.timed else "acceptance_length"
        return check_choice("of", of, FIGURES)

    @property
    def _notes(self) -> list[str]:
        return [f"Not finished yet, and left out: {counted(self.missing, 'cell')}."] * bool(
            self.missing
        )
