"""A table of text cells, as Markdown, LaTeX or HTML, and what is shown in tables."""

from __future__ import annotations

import shutil
import textwrap
from abc import ABC, abstractmethod
from dataclasses import dataclass
from html import escape
from typing import Any

from specdec.arguments import check_type
from specdec.printable import printable
from specdec.trace.files import need

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first column is aligned left, all others right.

    Args:
        header: names of the columns.
        rows: cells of each row.
        notes: sentences below the table.

    Raises:
        ValueError: a row has another number of cells than the header.

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
        check_type("header", self.header, list[str])
        check_type("rows", self.rows, list[list[str]])
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
        """A `tabular` with the rules of the package booktabs."""
        columns = "l" + "r" * (len(self.header) - 1)
        lines = [" & ".join(map(_escape, line)) + r" \\" for line in [self.header, *self.rows]]
        body = [r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
        notes = [f"% {note}" for note in self.notes]
        return "\n".join([rf"\begin{{tabular}}{{{columns}}}", *body, r"\end{tabular}", *notes])

    def html(self) -> str:
        """For a notebook."""

        def line(cells: list[str], tag: str) -> str:
            first, *others = (f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
            first = first.replace(f"<{tag}>", f'<{tag} style="text-align:left">', 1)
            return f"<tr>{first}{''.join(others)}</tr>"

        rows = "".join(line(row, "td") for row in self.rows)
        notes = "".join(f"<div>{escape(note)}</div>" for note in self.notes)
        return f"<table>{line(self.header, 'th')}{rows}</table>{notes}"

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
        >>> print(Lengths().to_text())
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
        return "\n\n".join(str(table) for table in self.tables())

    def to_markdown(self) -> str:
        """All tables, as GitHub reads them."""
        return "\n\n".join(table.markdown() for table in self.tables())

    def to_latex(self) -> str:
        """All tables, for the package booktabs."""
        return "\n\n".join(table.latex() for table in self.tables())

    def to_frame(self) -> Any:
        """A pandas frame with the measured numbers, one line per record.

        Raises:
            ImportError: pandas is not installed.
        """
        return need("pandas", "to_frame()").DataFrame(self.records())

    def _repr_html_(self) -> str:
        return "".join(table.html() for table in self.tables())

    def __repr__(self) -> str:
        return str(self)


def _escape(cell: str) -> str:
    return "".join(_LATEX.get(character, character) for character in cell)
