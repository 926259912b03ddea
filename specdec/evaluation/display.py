"""Shows where the tokens of a text came from: colour on a terminal, plain markers elsewhere."""

import os
from typing import TextIO

from transformers import PreTrainedTokenizerBase

from specdec.results import RowStep, text_pieces, visible

_COLOURS = {"accepted": "\x1b[32m", "recovered": "\x1b[31m", "bonus": "\x1b[34m"}
_MARKERS = {"accepted": ("", ""), "recovered": ("[", "]"), "bonus": ("<", ">")}
_RESET = "\x1b[0m"


def uses_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal that wants colour (see https://no-color.org)."""
    return stream.isatty() and "NO_COLOR" not in os.environ


def colour_key(stream: TextIO) -> str:
    """One line that explains how kinds of tokens are marked on `stream`."""
    return "tokens: " + "  ".join(_mark(kind, kind, uses_colour(stream)) for kind in _COLOURS)


def coloured_text(
    tokenizer: PreTrainedTokenizerBase, prompt: str, steps: list[RowStep], stream: TextIO
) -> str:
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
    in_colour = uses_colour(stream)
    pieces = text_pieces(tokenizer, tokens, kinds)
    if stream.isatty():  # which would obey control characters
        prompt, pieces = visible(prompt), [(visible(text), kind) for text, kind in pieces]
    return prompt + "".join(_mark(text, kind, in_colour) for text, kind in pieces)


def _mark(text: str, kind: str, in_colour: bool) -> str:
    if in_colour:
        return f"{_COLOURS[kind]}{text}{_RESET}"
    before, after = _MARKERS[kind]
    return f"{before}{text}{after}"
