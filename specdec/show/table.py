"""A table of text cells, as text, Markdown, LaTeX or HTML, and what is shown in tables."""

from __future__ import annotations

import shutil
import textwrap
from abc import ABC, abstractmethod
from dataclasses import dataclass
from html import escape
from importlib import import_module
from typing import Any

from specdec.show.text import printable


def need(module: str, what: str) -> Any:
    """Imports an optional library."""
    try:
        return import_module(module)
    except ImportError as error:
        extra = "specdec-torch[plots]"
        raise ImportError(f"{what} needs {module}: pip install '{extra}'") from error


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first column is aligned left, all others right.

    Args:
        header: names of the columns.
        rows: cells of each row.
        notes: sentences below the table.

    Example:
        >>> print(Table(["drafter", "length"], [["lookup", "2.10"]]).markdown())
        | drafter | length |
        |---|---:|
        | lookup | 2.10 |
    """

    header: list[str]
    rows: list[list[str]]
    notes: tuple[str, ...] = ()

    def __post_init__(self):
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"a row has {len(row)} cells under a header of {len(self.header)}")

    def markdown(self) -> str:
        """As GitHub reads it; a bar inside a cell is escaped."""
        lines = [self.header, *self.rows]
        text = [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        ]
        text.insert(1, "|---|" + "---:|" * (len(self.header) - 1))
        return "\n".join([*text, *(f"\n{note}" for note in self.notes)])

    def latex(self) -> str:
        """A `tabular` with the rules of the package booktabs, and the notes as comments."""
        columns = "l" + "r" * (len(self.header) - 1)
        frame = need("pandas", "to_latex()").DataFrame(self.rows, columns=self.header)
        text = frame.to_latex(index=False, escape=True, column_format=columns)
        return text + "\n".join(f"% {note}" for note in self.notes)

    def html(self) -> str:
        """For a notebook; in columns of text where pandas is not installed."""
        try:
            pandas = need("pandas", "html()")
        except ImportError:
            return f"<pre>{escape(str(self))}</pre>"
        frame = pandas.DataFrame(self.rows, columns=self.header)
        with pandas.option_context("display.max_colwidth", None):
            table = frame.to_html(index=False, border=0)
        return table + "".join(f"<div>{escape(note)}</div>" for note in self.notes)

    def __str__(self) -> str:
        """For a terminal: columns for which it has no room follow below, after the first one again,
        and cells are `printable`.
        """
        room = shutil.get_terminal_size().columns
        columns = [
            list(map(printable, cells)) for cells in zip(self.header, *self.rows, strict=True)
        ]
        widths = [max(map(len, cells)) for cells in columns]
        first = [cell.ljust(widths[0]) for cell in columns[0]]
        blocks = [[first]]
        for cells, width in zip(columns[1:], widths[1:], strict=True):
            used = sum(len(beside[0]) + 2 for beside in blocks[-1])
            if used + width > room and len(blocks[-1]) > 1:
                blocks.append([first])
            blocks[-1].append([cell.rjust(width) for cell in cells])
        lines = [[*map("  ".join, zip(*block, strict=True)), ""] for block in blocks]
        shown = [line.rstrip() for block in lines for line in block][:-1]
        notes = (textwrap.fill(note, room, break_on_hyphens=False) for note in self.notes)
        return "\n".join([*shown, *notes])


class Tabular(ABC):
    """Figures that are shown in tables and become a frame; the figures of this package have all of
    these methods by the same names.

    Example:
        >>> class Lengths(Tabular):
        ...     def tables(self):
        ...         return [Table(["drafter", "length"], [["lookup", "2.10"]])]
        ...
        ...     def records(self):
        ...         return [{"drafter": "lookup", "length": 2.1}]
        >>> print(Lengths())
        drafter  length
        lookup     2.10
    """

    @abstractmethod
    def tables(self) -> list[Table]:
        """What is shown."""

    @abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """The measured numbers, a line of the frame each."""

    def to_text(self) -> str:
        """In columns, for a terminal."""
        return "\n\n".join(map(str, self.tables()))

    def to_markdown(self) -> str:
        """All tables, as GitHub reads them."""
        return "\n\n".join(table.markdown() for table in self.tables())

    def to_latex(self) -> str:
        """All tables, for the package booktabs."""
        return "\n\n".join(table.latex() for table in self.tables())

    def to_frame(self) -> Any:
        """A pandas frame with the measured numbers, one line per record."""
        return need("pandas", "to_frame()").DataFrame(self.records())

    def _repr_html_(self) -> str:
        return "".join(table.html() for table in self.tables())

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return str(self)
