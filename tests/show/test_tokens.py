"""Coloured text is the decoded text with marks in it, however characters fall into tokens."""

import io

import pytest
import torch
from tokenizers import decoders

from specdec import zoo
from specdec.lab.show.tokens import colour_key, coloured_pieces, coloured_text
from specdec.row_step import RowStep

TOKENIZER = zoo.load_tokenizer()
TEXTS = {
    "hanzi": "x = 'é漢字'",
    "emoji": "🙂🙂",
    "ascii": "def f():\n    return 1",
    "quotes": "naïve – “quotes”",
}


class Terminal(io.StringIO):
    """Wants colour."""

    def isatty(self) -> bool:
        """It does."""
        return True


def steps_of(tokens: list[int], seed: int) -> list[RowStep]:
    """The tokens in blocks of one to three, as if drafts of three had been accepted in part."""
    generator, steps = torch.Generator().manual_seed(seed), []
    while tokens:
        accepted = int(torch.randint(0, 4, (), generator=generator))
        new, tokens = tokens[: accepted + 1], tokens[accepted + 1 :]
        steps.append(RowStep([*new[:accepted], *[7] * 3][:3], accepted, new))
    return steps


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_without_its_marks_it_is_the_text_character_for_character(text, stream, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    tokens = TOKENIZER(text, add_special_tokens=False).input_ids
    if text == TEXTS["emoji"]:  # whose characters need several tokens
        assert "\ufffd" in TOKENIZER.decode(tokens[:1])
    shown = coloured_text(TOKENIZER, "prompt: ", steps_of(tokens, seed=1), stream)
    assert ("\x1b" in shown) == stream.isatty()
    for mark in ("\x1b[32m", "\x1b[31m", "\x1b[34m", "\x1b[0m", "[", "]", "<", ">"):
        shown = shown.replace(mark, "")
    assert shown == "prompt: " + text == "prompt: " + TOKENIZER.decode(tokens)


def test_every_kind_of_token_has_its_mark():
    a, b, c, d = TOKENIZER("wxyz" * 4, add_special_tokens=False).input_ids[:4]
    steps = [RowStep([a, 7], 1, [a, b]), RowStep([c], 1, [c, d])]
    w, x, y, z = (TOKENIZER.decode([token]) for token in (a, b, c, d))
    assert coloured_text(TOKENIZER, "", steps, io.StringIO()) == f"{w}[{x}]{y}<{z}>"


def test_a_space_between_prompt_and_text_is_shown():
    """Of a decoder that drops the one that begins a text, as Llama 2's does."""
    tokenizer = zoo.load_tokenizer()
    parts = [tokenizer.backend_tokenizer.decoder, decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(parts)
    tokens = tokenizer(" the cat", add_special_tokens=False).input_ids
    assert tokenizer.decode(tokens) == "the cat"
    steps = [RowStep([], 0, [token]) for token in tokens]
    for prompt in ("see", "🙂", ""):
        shown = coloured_text(tokenizer, prompt, steps, io.StringIO())
        assert shown.replace("<", "").replace(">", "") == (prompt and prompt + " ") + "the cat"


def test_a_file_and_no_color_get_markers(monkeypatch):
    assert "\x1b" not in colour_key(io.StringIO())
    for value, is_coloured in (("1", False), ("", True)):  # as no-color.org has it
        monkeypatch.setenv("NO_COLOR", value)
        assert ("\x1b" in colour_key(Terminal())) == is_coloured


def test_pieces_come_as_soon_as_their_characters_are_whole():
    tokens = TOKENIZER(TEXTS["emoji"] + "x", add_special_tokens=False).input_ids
    seen = []

    def steps():
        for token in tokens:
            seen.append(token)
            yield RowStep([], 0, [token])

    for shown in coloured_pieces(TOKENIZER, steps(), io.StringIO()):
        assert TOKENIZER.decode(seen).endswith(shown[1:-1])  # nothing after it was asked for
    assert len(seen) == len(tokens)


def test_a_terminal_gets_no_control_characters_of_the_text(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = "a\x1b[2J\tb\n"
    tokens = TOKENIZER(text, add_special_tokens=False).input_ids
    steps = [RowStep([], 0, [token]) for token in tokens]
    on_terminal, in_file = (
        coloured_text(TOKENIZER, "\x9b", steps, stream) for stream in (Terminal(), io.StringIO())
    )
    assert "\x1b" not in on_terminal
    assert on_terminal.replace("<", "").replace(">", "") == "\\x9ba\\x1b[2J\tb\n"
    assert in_file.replace("<", "").replace(">", "") == "\x9b" + text
