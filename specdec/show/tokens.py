"""Where the tokens of a text came from: colour on a terminal, markers elsewhere, HTML in notebooks.

A token is `"accepted"`, `"recovered"` or `"bonus"`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from html import escape
from typing import Any, NamedTuple, TextIO

from specdec.show.text import pieces, visible


class _Look(NamedTuple):
    """How tokens of one kind look."""

    marked: str
    colour: str
    background: str
    underline: str = ""


_LOOKS = {
    "accepted": _Look("{}", "\x1b[32m", "#bfe8bf"),
    "recovered": _Look("[{}]", "\x1b[31m", "#f6c1c1", "border-bottom:2px solid #b42318;"),
    "bonus": _Look("<{}>", "\x1b[34m", "#bcd4f6", "border-bottom:2px dotted #1f5fbf;"),
}
KINDS = tuple(_LOOKS)
_RESET = "\x1b[0m"
END_OF_LINE = '<span style="opacity:.45;user-select:none">\u21b5</span><br>'
"""A visible mark, which is not copied with the text."""


def marked(text: str, kind: str) -> str:
    """The text between the markers of its kind.

    Example:
        >>> marked("a", "accepted"), marked("b", "recovered"), marked("c", "bonus")
        ('a', '[b]', '<c>')
    """
    return _LOOKS[kind].marked.format(text)


def uses_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal that wants colour (see https://no-color.org)."""
    return stream.isatty() and "NO_COLOR" not in os.environ


def colour_key(stream: TextIO) -> str:
    """One line that explains how kinds of tokens are marked on `stream`."""
    return "tokens: " + "  ".join(_on(stream, kind, kind) for kind in KINDS)


def coloured_text(tokenizer: Any, prompt: str, steps: Iterable[Any], stream: TextIO) -> str:
    """The prompt and the new text, each token marked with its kind.

    Args:
        tokenizer: decodes the tokens.
        prompt: printed unmarked.
        steps: of one row, from `GenerationResult.steps`.
        stream: where the text will go; decides between colour and markers.

    Returns:
        Text whose unmarked part equals the decoded tokens, character for character; on a terminal,
        control characters are shown as their escapes.
    """
    kinds = [kind for step in steps for kind in step.kinds]
    tokens = [token for step in steps for token in step.new_tokens]
    shown = visible if stream.isatty() else str  # a terminal would obey control characters
    found = pieces(tokenizer, tokens)
    return shown(prompt) + "".join(_on(stream, shown(text), kinds[i]) for text, i in found)


def _on(stream: TextIO, text: str, kind: str) -> str:
    if uses_colour(stream):
        return f"{_LOOKS[kind].colour}{text}{_RESET}"
    return marked(text, kind)


def token_span(text: str, kind: str, *, background: str | None = None, title: str = "") -> str:
    """HTML of one token, readable on light and dark pages; kinds also differ by an underline, for
    readers who do not see the colours.

    Args:
        text: of the token; ends of lines get a mark.
        kind: of the token.
        background: colour in place of the kind's own.
        title: shown under the pointer; the kind by default.

    Example:
        >>> token_span("a < b", "accepted").endswith('title="accepted">a &lt; b</span>')
        True
    """
    look = _LOOKS[kind]
    shown = escape(text).replace("\n", END_OF_LINE)
    # A token of nothing but spaces would have no area to point at.
    shown = shown if text.strip(" ") else shown.replace(" ", "&nbsp;") or "&nbsp;"
    # Room below, where some fonts draw the underscore; room beside, so that tokens stand apart.
    style = f"color:#111;border-radius:2px;padding:1px 0 3px;margin-right:1px;{look.underline}"
    colour = look.background if background is None else background
    return (
        f'<span style="{style}background:{colour}" title="{escape(title or kind)}">{shown}</span>'
    )


def text_html(spans: Iterable[str]) -> str:
    """HTML of a text of token spans; long lines are wrapped."""
    style = "white-space:pre-wrap;line-height:1.7;margin:.5em 0"
    return f'<pre style="{style}">{"".join(spans)}</pre>'
