"""Foreign text, made fit for a terminal.

A configuration, a tensor's name, a prompt or what a model writes may hold control characters, which
move a terminal's cursor, change its title or hide what was printed. They are shown as their
escapes.
"""

from __future__ import annotations

from typing import Any


def printable(text: str, *, keep: str = "") -> str:
    r"""The text with every character escaped that has no picture; spaces stay.

    Args:
        text: any.
        keep: characters that stay as they are, ends of lines for instance.

    Example:
        >>> printable("fc\x1b[2J.weight\n"), printable("größer ✓\n", keep="\n")
        ('fc\\x1b[2J.weight\\n', 'größer ✓\n')
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def printable_json(content: Any) -> Any:
    """Parsed JSON with `printable` keys and strings."""
    if isinstance(content, str):
        return printable(content)
    if isinstance(content, list):
        return [printable_json(item) for item in content]
    if isinstance(content, dict):
        return {printable(key): printable_json(item) for key, item in content.items()}
    return content
