"""A trace as a page for a browser: `page.html`, filled with its records and the tokens' text."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import astuple
from io import BytesIO
from pathlib import Path
from typing import Any

from specdec.arguments import check_integer
from specdec.lab.show.text import pieces, printable, visible

_TEMPLATE = Path(__file__).with_name("page.html")


def page_of(
    trace: Any, tokenizer: Any, rows: Iterable[int] | None = None, steps: range | None = None
) -> str:
    """The page; it needs nothing but a browser.

    Args:
        trace: a `specdec.lab.trace.Trace`.
        tokenizer: decodes the tokens; `None` shows ids.
        rows, steps: as in `Trace.to_html`.
    """
    steps = range(len(trace.times)) if steps is None else steps
    if not isinstance(steps, range) or steps.step != 1:
        raise ValueError(f"steps must be a range such as range(10, 20), got {steps!r}")
    for step in (steps.start, steps.stop - 1) if trace.times else ():
        check_integer("a step of the trace", step, 0, len(trace.times) - 1)
    rows = range(len(trace)) if rows is None else rows
    chosen = {check_integer("a row of the trace", row, 0, len(trace) - 1): [] for row in rows}
    for record in (records := trace.to_records()):
        if record["row"] in chosen and record["step"] in steps:
            chosen[record["row"]].append(record)
    # Times stand once, by step, and the row beside its records.
    columns = [name for name in (*records, {})[0] if name != "row" and not name.endswith("_ms")]
    tokens = {r[name] for r in records for name in ("draft_token", "new_token")} - {None}
    content = {
        "about": {**trace.about, **trace.about.get("sampling", {})},
        "columns": columns,
        "times": [astuple(taken) for taken in trace.times],
        "texts": tokenizer and {token: printable(tokenizer.decode([token])) for token in tokens},
        "rows": [_row(trace, own, columns, tokenizer, steps) for own in chosen.values() if own],
    }
    text = json.dumps(content, separators=(",", ":")).replace("<", r"\u003c")  # ends no element
    return _TEMPLATE.read_text(encoding="utf-8").replace("{{trace}}", text)


def _row(
    trace: Any, records: list[dict], columns: list[str], tokenizer: Any, steps: range
) -> dict[str, Any]:
    """What the page shows of a row: its records of these steps, and the text of their tokens."""
    row = records[0]["row"]
    ids = [*trace.prompts[row], *(t for step in trace[row][: steps.start] for t in step.new_tokens)]
    tokens = [record["new_token"] for record in records if record["new_token"] is not None]
    pictures = trace.pictures[row] if trace.pictures else ()
    folds = _folds(trace.placeholders[row] if trace.placeholders else ())
    return {
        "row": row,
        "prompt": _prompt(ids, folds, len(pictures), tokenizer),
        "pictures": [_inline(picture) for picture in pictures],
        "pieces": [(visible(text), at) for text, at in pieces(tokenizer, tokens, ids)],
        "records": [[record[name] for name in columns] for record in records],
    }


def _folds(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs of placeholders, those together that one token parts: an end of a picture's row."""
    folds: list[tuple[int, int]] = []
    for first, end in runs:
        if folds and first - folds[-1][1] <= 1:
            first = folds.pop()[0]
        folds.append((first, end))
    return folds


def _prompt(
    ids: list[int], folds: list[tuple[int, int]], num_pictures: int, tokenizer: Any
) -> list[str | dict[str, str]]:
    """A prompt in parts: its text, and a mark for each run of placeholders."""

    def text(some: list[int]) -> str:
        return "".join(f"{i} " for i in some) if tokenizer is None else tokenizer.decode(some)

    parts: list[str | dict[str, str]] = []
    last, is_known = 0, num_pictures == len(folds)
    for number, (first, end) in enumerate(folds, start=1):
        what = f"picture {number}" if is_known else "a picture" if num_pictures else "no text"
        parts += [visible(text(ids[last:first])), {"fold": f"{what}, {end - first} tokens"}]
        last = end
    return [part for part in [*parts, visible(text(ids[last:]))] if part]


_MOST_PIXELS = 320
"""Of the longer side of a picture on a page."""


def _inline(picture: Any) -> dict[str, str]:
    """A small copy of a picture, as a page holds it, and the size that it had."""
    small = picture.convert("RGB")
    small.thumbnail((_MOST_PIXELS, _MOST_PIXELS))
    small.save(file := BytesIO(), "JPEG", quality=85)
    data = b64encode(file.getvalue()).decode()
    size = f"{picture.width} x {picture.height}"
    return {"data": f"data:image/jpeg;base64,{data}", "size": size}
