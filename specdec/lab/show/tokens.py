"""Where the tokens of a text came from: colour on a terminal, markers elsewhere, HTML in notebooks.

A token is `"accepted"`, `"recovered"` or `"bonus"`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any, TextIO

from specdec.lab.show.text import pieces, visible

_LOOKS = {  # between markers, the colour on a terminal, CSS
    "accepted": ("{}", "\x1b[32m", "background:#bfe8bf"),
    "recovered": ("[{}]", "\x1b[31m", "background:#f6c1c1;border-bottom:2px solid #b42318"),
    "bonus": ("<{}>", "\x1b[34m", "background:#bcd4f6;border-bottom:2px dotted #1f5fbf"),
}
KINDS = tuple(_LOOKS)


def marked(text: str, kind: str, *, stream: TextIO | None = None) -> str:
    """The text between the markers of its kind, or in its colour where a stream is a terminal that
    wants colour (see https://no-color.org).

    Example:
        >>> marked("a", "accepted"), marked("b", "recovered"), marked("c", "bonus")
        ('a', '[b]', '<c>')
    """
    markers, colour, _ = _LOOKS[kind]
    is_coloured = stream is not None and stream.isatty() and not os.environ.get("NO_COLOR")
    return f"{colour}{text}\x1b[0m" if is_coloured else markers.format(text)


def colour_key(stream: TextIO) -> str:
    """One line that explains how kinds of tokens are marked on `stream`."""
    return "tokens: " + "  ".join(marked(kind, kind, stream=stream) for kind in KINDS)


def coloured_pieces(
    tokenizer: Any, steps: Iterable[Any], stream: TextIO, before: Sequence[int] = ()
) -> Iterator[str]:
    """The new text, each token marked with its kind, in whole characters as the steps come.

    Args:
        tokenizer: decodes the tokens.
        steps: of one row, from `GenerationResult.steps`.
        stream: where the text will go; decides between colour and markers.
        before: tokens that the text stands behind.

    Yields:
        Pieces whose unmarked part is the decoded text, character for character; on a terminal,
        control characters are shown as their escapes.
    """
    kinds = []

    def tokens() -> Iterator[int]:
        for step in steps:
            kinds.extend(step.kinds)
            yield from step.new_tokens

    shown = visible if stream.isatty() else str  # a terminal would obey control characters
    for text, first in pieces(tokenizer, tokens(), before):
        if text:
            yield marked(shown(text), kinds[first], stream=stream)


def coloured_text(tokenizer: Any, prompt: str, steps: Iterable[Any], stream: TextIO) -> str:
    """The prompt, unmarked, and after it the `coloured_pieces`."""
    start = visible(prompt) if stream.isatty() else prompt
    before = tokenizer(prompt, add_special_tokens=False).input_ids
    return start + "".join(coloured_pieces(tokenizer, steps, stream, before))


def token_span(text: str, kind: str) -> str:
    """HTML of one token, readable on light and dark pages; kinds also differ by an underline, for
    readers who do not see the colours. Ends of lines get a mark, which is not copied.

    Example:
        >>> token_span("a < b", "accepted").endswith('title="accepted">a &lt; b</span>')
        True
    """
    end = '<span style="opacity:.45;user-select:none">\u21b5</span><br>'
    # Spaces have an area to point at even at an end of a line; some fonts draw below the line.
    look = "color:#111;border-radius:2px;padding:1px 0 3px;white-space:break-spaces"
    shown = escape(text).replace("\n", end) or "&nbsp;"
    return f'<span style="{look};{_LOOKS[kind][2]}" title="{kind}">{shown}</span>'
