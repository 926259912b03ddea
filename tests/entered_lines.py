"""Of the files of the library that a call enters: lines of code that ran, and lines of code.

Statements count by their lines, without docstrings, imports, comments, and the lines of `def` and
`class`.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import specdec

PACKAGE = f"{Path(specdec.__file__).parent}/"
LEFT_OUT = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef


def statements(node: ast.AST) -> Iterator[range]:
    """Lines of each statement; of one with a body, those before the body."""
    for part in ast.iter_child_nodes(node):
        is_text = isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
        if isinstance(part, ast.stmt) and not isinstance(part, LEFT_OUT) and not is_text:
            end = part.body[0].lineno if hasattr(part, "body") else part.end_lineno + 1
            yield range(part.lineno, max(end, part.lineno + 1))
        if isinstance(part, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from statements(part)


def count_lines(function: Callable[[], Any]) -> dict[str, tuple[int, int]]:
    """Runs a function; by entered file, how many lines of code ran, and how many there are."""
    seen: dict[str, set[int]] = defaultdict(set)

    def note(frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            seen[frame.f_code.co_filename].add(frame.f_lineno)
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        function()
    finally:
        sys.settrace(before)
    found = {}
    for file, lines in seen.items():
        spans = [*statements(ast.parse(Path(file).read_text()))]
        ran = sum(len(span) for span in spans if lines & {*span})
        found[file.removeprefix(PACKAGE)] = ran, sum(map(len, spans))
    return found
