"""Text of foreign files, made fit for a terminal.

A configuration, a tensor's name or a file's name may hold control characters, which move a
terminal's cursor, change its title or hide what was printed. They are shown as their escapes.
"""

from __future__ import annotations

from typing import Any


def printable(text: str) -> str:
    r"""The text with every character escaped that has no picture; spaces stay.

    Example:
        >>> printable("fc\x1b[2J.weight\n"), printable("größer ✓")
        ('fc\\x1b[2J.weight\\n', 'größer ✓')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_json(content: Any) -> Any:
    """Parsed JSON with `printable` keys and strings."""
    if isinstance(content, str):
        return printable(content)
    if isinstance(content, list):
        return [printable_json(item) for item in content]
    if isinstance(content, dict):
        return {printable(key): printable_json(item) for key, item in content.items()}
    return content
