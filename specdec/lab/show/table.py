"""A table of text cells, as text, Markdown, LaTeX or HTML, and what is shown in tables."""

from __future__ import annotations

import re
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from importlib import import_module
from io import StringIO
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from specdec.lab.show.text import printable


def need(module: str, what: str) -> Any:
    """Imports an optional library."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{what} needs {module}: pip install 'specdec-torch[plots]'") from error


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; columns of labels are aligned left, all others right.

    Args:
        header: names of the columns.
        rows: cells of each row.
        notes: sentences below the table.
        bold: (row, column) of cells that stand out.
        labels: so many first columns say what a row is.

    Example:
        >>> print(Table(["drafter", "length"], [["lookup", "2.10"]]).markdown())
        | drafter | length |
        |---|---:|
        | lookup | 2.10 |
    """

    header: list[str]
    rows: list[list[str]]
    notes: tuple[str, ...] = ()
    bold: frozenset[tuple[int, int]] = frozenset()
    labels: int = 1

    def __post_init__(self):
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"a row has {len(row)} cells under a header of {len(self.header)}")

    def markdown(self) -> str:
        """As GitHub reads it; a bar inside a cell is escaped."""
        rows = [[*map(_markdown, self.header)], *self._rows(_markdown, "**{}**")]
        text = [f"| {' | '.join(line)} |" for line in rows]
        text.insert(1, "|" + "---|" * self.labels + "---:|" * (len(self.header) - self.labels))
        return "\n".join([*text, *(f"\n{_line(note)}" for note in self.notes)])

    def latex(self, *, caption: str | None = None, label: str | None = None) -> str:
        """A `tabular` with the rules of the package booktabs, and the notes as comments.

        Args:
            caption, label: of a `table` around it, with the notes below in small letters; of
                neither there is none. Both stand there as they are: LaTeX's own commands work.
        """
        columns = "l" * self.labels + "r" * (len(self.header) - self.labels)
        rows, header = self._rows(_latex, "\\textbf{{{}}}"), map(_latex, self.header)
        frame = need("pandas", "to_latex()").DataFrame(rows, columns=header)
        text = frame.to_latex(index=False, escape=False, column_format=columns)
        if caption is None and label is None:
            return text + "\n".join(f"% {_line(note)}" for note in self.notes)
        around = [r"\begin{table}", r"\centering", rf"\caption{{{caption}}}" * bool(caption)]
        around += [rf"\label{{{label}}}" * bool(label), text.rstrip()]
        around += [r"\par\smallskip{\footnotesize " + " ".join(map(_latex, self.notes)) + "}"]
        return "\n".join(filter(None, [*around, r"\end{table}"])) + "\n"

    def html(self) -> str:
        """For a notebook; in columns of text where pandas is not installed."""
        try:
            pandas = need("pandas", "html()")
        except ImportError:
            return f"<pre>{escape(str(self))}</pre>"
        frame = pandas.DataFrame(self._rows(escape, "<b>{}</b>"), columns=map(escape, self.header))
        with pandas.option_context("display.max_colwidth", None):
            table = frame.to_html(index=False, border=0, escape=False)
        return table + "".join(f"<div>{escape(note)}</div>" for note in self.notes)

    def _rows(self, shown: Callable[[str], str], bold: str) -> list[list[str]]:
        """The cells, those that stand out in a form of their own."""
        return [
            [bold.format(shown(c)) if (r, i) in self.bold else shown(c) for i, c in enumerate(row)]
            for r, row in enumerate(self.rows)
        ]

    def __str__(self) -> str:
        """In columns, with a rule below the header on a terminal. Columns for which it has no room
        follow below, after the labels again, and cells are `printable`.
        """
        room = shutil.get_terminal_size().columns
        wide = Console(file=StringIO(), width=9999, color_system=None, force_jupyter=False)
        labels = list(range(self.labels))
        blocks = [labels.copy()]
        for column in range(self.labels, len(self.header)):
            width = wide.measure(self._grid([*blocks[-1], column])).maximum
            if width > room and len(blocks[-1]) > self.labels:
                blocks.append(labels.copy())
            blocks[-1].append(column)
        for block in blocks:
            wide.print(*[""] * (block is not blocks[0]), self._grid(block), sep="\n")
        wide.print(*map(Text, self.notes), sep="\n", width=room)
        return "\n".join(map(str.rstrip, wide.file.getvalue().rstrip().splitlines()))

    def _grid(self, columns: list[int]) -> Grid:
        ruled = box.SIMPLE_HEAD if sys.stdout.isatty() else None
        grid = Grid(box=ruled, show_edge=False, pad_edge=False)
        for at in columns:
            side = "left" if at < self.labels else "right"
            grid.add_column(Text(printable(self.header[at])), justify=side)
        for row in self.rows:
            grid.add_row(*(Text(printable(row[at])) for at in columns))
        return grid


def _line(text: str) -> str:
    """Text in one line: an end of a line would end a row of a table, or a comment."""
    return printable(" ".join(text.split()))


def _markdown(text: str) -> str:
    return _line(text).replace("|", "\\|")


def _latex(text: str) -> str:
    """Text with the characters escaped that LaTeX would obey; signs and stars of numbers as
    mathematics.
    """
    named = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum"}
    escapes = {c: f"\\{c}" for c in "&%$#_{}"} | {c: f"\\text{n}{{}}" for c, n in named.items()}
    text = _line(text).translate(str.maketrans(escapes | {"±": r"$\pm$", "≤": r"$\le$"}))
    text = re.sub(r"(?<![\w.)-])-(?=\d)", "$-$", text)
    return re.sub(r"(?<!\*)(\*{1,3})(?!\*)", r"$^{\1}$", text)


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
