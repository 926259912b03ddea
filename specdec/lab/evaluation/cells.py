"""Cells of a study: the values of its axes, their names, and the folder that holds the cells."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.arguments import check_choice, shown
from specdec.atomic import write_text
from specdec.lab.evaluation.evaluation import Evaluation
from specdec.lab.evaluation.markers import alone
from specdec.lab.show.text import draft_size

Cell = dict[str, Any]
"""The value of every axis: `drafter`, `draft`, `sampler`, `temperature` and what was varied."""
DRAWING = ("proposal", "draft_temperature")
"""How a drafter draws, which has no effect where the temperature is 0."""
OF_DRAFTER = (*DRAWING, "visible")
"""Varied options that go to the drafter; all others go to `generate`."""
CHOICES = ("drafter", "draft", "sampler", *OF_DRAFTER)
"""Axes of what is chosen; the others say under which conditions, and cells of other conditions are
not ranked against each other.
"""
FIGURES = {
    "acceptance_length": ".2f",
    "acceptance_rate": ".3f",
    "block_efficiency": ".2f",
    "ms_per_token": ".2f",
    "tokens_per_second": ".0f",
}
"""What can be shown of a cell, with its format."""
_CONTENTS = "study.json"


def axes_of(cells: Sequence[Cell], least: int = 1) -> dict[str, list[Any]]:
    """The values of every axis, in their order; of those axes that have at least so many."""
    names = dict.fromkeys(name for cell in cells for name in cell)
    axes = {n: list(dict.fromkeys(cell.get(n) for cell in cells)) for n in names}
    return {name: values for name, values in axes.items() if len(values) >= least}


def places_of(cells: Sequence[Cell], wanted: Mapping[str, Any]) -> list[int]:
    """Which cells have these values.

    Raises:
        ValueError: an axis or value that no cell has; lists those that there are.
    """
    axes = axes_of(cells)
    for name, value in wanted.items():
        check_choice("an axis", name, axes)
        check_choice(f"a value of {name}", value, axes[name])
    return [i for i, cell in enumerate(cells) if wanted.items() <= cell.items()]


def number(value: float) -> str:
    """As short as it can be told from other numbers.

    Example:
        >>> number(1.0), number(0.1234567)
        ('1', '0.1234567')
    """
    return short if float(short := f"{value:g}") == value else repr(value)


def called(axis: str, value: Any) -> str:
    """What a value is called.

    Example:
        >>> called("draft", 4), called("temperature", 1.0), called("top_p", 0.9)
        ('K = 4', 'T = 1', 'top_p = 0.9')
    """
    if axis == "draft" and value is not None:
        return draft_size(value) if isinstance(value, int) else f"tree {value}"
    if axis == "temperature":
        return f"T = {number(value)}"
    if axis in CHOICES:
        return "own" if value is None else str(value)
    return f"{axis} = {value}"


@dataclass(frozen=True)
class Line:
    """Cells that differ in one axis only.

    Args:
        labels: values by axis; several, where their cells are one run.
        runs: by value of the axis.
    """

    labels: dict[str, list[Any]]
    runs: dict[Any, Evaluation]


def partner_of(
    cells: Sequence[Cell], runs: Sequence[Evaluation], i: int, values: Mapping[str, Any]
) -> Evaluation | None:
    """The run of the cell with these values that is like a cell in all others or, where there is
    none, the only one of its conditions.
    """
    places_of(cells, values)  # raises ValueError for values that no cell has
    own = cells[i] | dict(values)
    conditions = {n: v for n, v in own.items() if n in values or n not in CHOICES}
    for wanted in (own, conditions):
        pairs = zip(cells, runs, strict=True)
        found = {id(run): run for cell, run in pairs if wanted.items() <= cell.items()}
        if len(found) == 1:
            return next(iter(found.values()))
    return None


def lines_of(cells: Sequence[Cell], runs: Sequence[Evaluation], columns: str) -> list[Line]:
    """The cells along an axis, conditions first. Lines of the same runs are one, with all their
    labels.
    """
    names = [n for n in axes_of(cells, least=2) if n != columns] or ["drafter"]
    names = [n for n in sorted(names, key=CHOICES.__contains__) if n != columns]
    found: dict[tuple, dict[Any, Evaluation]] = {}
    for cell, run in zip(cells, runs, strict=True):
        found.setdefault(tuple(cell.get(n) for n in names), {})[cell.get(columns)] = run
    axes, alike = axes_of(cells), {}
    for key in sorted(
        found, key=lambda k: [axes[n].index(v) for n, v in zip(names, k, strict=True)]
    ):
        alike.setdefault(tuple((x, id(run)) for x, run in found[key].items()), []).append(key)
    return [
        Line(
            {n: list(dict.fromkeys(key[i] for key in keys)) for i, n in enumerate(names)},
            found[keys[0]],
        )
        for keys in alike.values()
    ]


def joined(axis: str, values: list[Any], every: Sequence[Any]) -> str:
    """Several values of an axis that has `every`."""
    is_long = len(values) > 2 and len(values) == len(every)
    return "all" if is_long else ", ".join(called(axis, value) for value in values)


def name_of(labels: Mapping[str, list[Any]], cells: Sequence[Cell]) -> str:
    """What tells cells from the others: their values in the axes of which they have not all."""
    axes = axes_of(cells)
    parts = (
        joined(name, values, axes[name])
        for name, values in labels.items()
        if name == "drafter" or set(values) != set(axes[name])
    )
    return ", ".join(parts)


def without_idle(cells: Sequence[Cell]) -> list[Cell]:
    """The cells without axes of drawing that no cell uses: old studies have these everywhere."""
    used = {name for cell in cells for name, v in cell.items() if v is not None}
    return [{n: v for n, v in c.items() if n in used or n not in DRAWING} for c in cells]


class StudyFolder:
    """The files of a study: one per rule, and `study.json`, which says of which cells they are.

    Args:
        path: of the folder, which is made if it is not there.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def read(self) -> tuple[list[Cell], list[str], bool]:
        """Every cell, the name of its file, and whether the study is timed."""
        try:
            found = json.loads((self.path / _CONTENTS).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path} is no folder of a study: {error}") from error
        if not isinstance(found, dict) or not {"timed", "cells"} <= found.keys():
            raise ValueError(
                f"{self.path} is no folder of a study: its {_CONTENTS} says something else, "
                f"{shown(found)}"
            )
        cells = without_idle([each["cell"] for each in found["cells"]])
        return cells, [each["file"] for each in found["cells"]], found["timed"]

    def add(self, cells: Sequence[Cell], files: Sequence[str], *, timed: bool) -> None:
        """Writes down cells of a study that begins or goes on.

        Raises:
            ValueError: the folder's study was timed otherwise.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        pairs = list(zip(cells, files, strict=True))
        while any(pair not in self._pairs(timed) for pair in pairs):
            with alone(self.path / _CONTENTS):  # of the processes that add to it
                known = self._pairs(timed)
                every = [*known, *(pair for pair in pairs if pair not in known)]
                content = {"timed": timed, "cells": [{"cell": c, "file": f} for c, f in every]}
                write_text(self.path / _CONTENTS, json.dumps(content, indent=1))

    def _pairs(self, timed: bool) -> list[tuple[Cell, str]]:
        """The cells that were added, and their files."""
        if not (self.path / _CONTENTS).exists():
            return []
        cells, files, was_timed = self.read()
        if cells and was_timed is not timed:
            raise ValueError(
                f"{self.path} holds a study with timed={was_timed}, whose times do not compare; "
                "choose another folder"
            )
        return list(zip(cells, files, strict=True))


def file_of(rule: Cell) -> str:
    """The name of a cell's file.

    Example:
        >>> file_of({"drafter": "zoo:eagle3", "draft": "32x6", "temperature": 1.0, "top_p": 0.9})
        'zoo-eagle3_32x6_T=1_top_p=0.9.jsonl'
    """
    parts, order = [], ("drafter", "draft", *DRAWING, "sampler", "temperature", *rule)
    for name in dict.fromkeys(order):
        if (value := rule.get(name)) is not None:
            text = number(value) if isinstance(value, float) else str(value)
            text = text if name in ("drafter", "draft", "sampler") else f"{name}={text}"
            parts.append(re.sub(r"[^\w.=+]+", "-", text.replace("temperature=", "T="))[-60:])
    return "_".join(parts).lstrip("-.") + ".jsonl"  # no option of a command, and not hidden
