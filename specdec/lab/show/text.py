"""Foreign text, made fit for a terminal, and the text of tokens in whole characters.

A configuration, a tensor's name, a prompt or what a model writes may hold control characters, which
move a terminal's cursor, change its title or hide what was printed. They are shown as their
escapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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


def visible(text: str) -> str:
    """`printable` text of several lines: their ends and tabs stay."""
    return printable(text, keep="\n\t")


LONGEST = 400
"""Characters of an error in one line: libraries dump whole configurations. An error whose text is
all of this package's names its own number, `longest`.
"""


def one_line(error: BaseException) -> str:
    """What an error says, in one printable line."""
    text = printable(" ".join(str(error).split())) or type(error).__name__
    longest = getattr(error, "longest", LONGEST)
    return text if len(text) <= longest else text[: longest - 3] + "..."


def draft_size(num_draft_tokens: int, depth: int | None = None) -> str:
    """How much is drafted in a step, in two words.

    Args:
        num_draft_tokens: of a chain, or nodes of a tree.
        depth: of a tree; `None` of a chain.

    Example:
        >>> draft_size(4), draft_size(32, 6)
        ('K = 4', 'tree 32x6')
    """
    if depth is None or depth >= num_draft_tokens:
        return f"K = {num_draft_tokens}"
    return f"tree {num_draft_tokens}x{depth}"


def printable_json(content: Any) -> Any:
    """Parsed JSON with `printable` keys and strings."""
    if isinstance(content, str):
        return printable(content)
    if isinstance(content, list):
        return [printable_json(item) for item in content]
    if isinstance(content, dict):
        return {printable(key): printable_json(item) for key, item in content.items()}
    return content


def pieces(
    tokenizer: Any, tokens: Iterable[int], before: Sequence[int] = ()
) -> Iterator[tuple[str, int]]:
    """The text of tokens, in pieces that are whole characters, as the tokens come; all pieces
    together are the decoded text.

    Args:
        tokenizer: decodes; `None` gives ids.
        tokens: of one row.
        before: tokens that the text stands behind; at the beginning of a text, Llama 2's decoder
            drops a space.

    Yields:
        Text, and the index of the first token that it belongs to. A token that only begins a
        character is shown with the token that completes it.
    """

    def decode(some: list[int]) -> str:
        if tokenizer is None:
            return "".join(f"{token} " for token in some)
        return tokenizer.decode(some, clean_up_tokenization_spaces=False)

    # A token's text may depend on there being one before it: what stands before is decoded, too.
    ends = (list(before[-n:]) for n in range(1, 5))
    last = next((end for end in ends if "\ufffd" not in decode(end)), [])
    own, first, text = [], 0, ""
    for token in tokens:
        own.append(token)
        text = decode(last + own)[len(decode(last)) :]
        if not text.endswith("\ufffd"):  # else a character that further tokens complete
            yield text, first
            last, own, first = own, [], first + len(own)
    if own:
        yield text, first
