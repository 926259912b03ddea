"""The rows of a `GenerationResult` as a text and a page, each token marked by its origin."""

from typing import Any

from specdec.lab.show.text import visible
from specdec.lab.show.tokens import KINDS, marked, token_span

_SHOWN_ROWS = 8


def text_of(result: Any) -> str:
    """The statistics in a line, then a line for each of the first rows."""
    count = len(result.lengths)
    lines = [f"GenerationResult of {count} row{'s' * (count != 1)}; {result.stats!r}"]
    lines.append("tokens: accepted  [recovered]  <bonus>")
    for row in range(min(count, _SHOWN_ROWS)):
        gap = " " if result.tokenizer is None else ""  # ids: the space is no part of a token
        texts = ((visible(text).removesuffix(gap), kind) for text, kind in result.pieces(row))
        lines.append(f"{_title(result, row)}: {gap.join(marked(*text) for text in texts)}")
    return "\n".join(lines + ["..."] * (count > _SHOWN_ROWS))


def html_of(result: Any) -> str:
    """A paragraph for each of the first rows, then the statistics, for notebooks."""
    key = " ".join(token_span(kind, kind) for kind in KINDS)
    parts = [f"<div>tokens: {key}</div>"]
    for row in range(min(len(result.lengths), _SHOWN_ROWS)):
        spans = "".join(token_span(visible(text), kind) for text, kind in result.pieces(row))
        style = "white-space:pre-wrap;line-height:1.7;margin:.5em 0"
        parts.append(f'<p>{_title(result, row)}</p><pre style="{style}">{spans}</pre>')
    return "".join([*parts, result.stats._repr_html_()])


def _title(result: Any, row: int) -> str:
    seed = f", seed {result.seeds[row]}" if result.seeds else ""
    return f"row {row} ({result.lengths[row]} tokens, {result.finish_reasons[row]}{seed})"
