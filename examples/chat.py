"""A conversation in the terminal, whose answers show how each token came:

    PYTHONPATH=. python examples/chat.py --target PATH_OR_ID

It takes the target, drafter and sampling of `specdec generate`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from secrets import randbits
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

from rich.console import Console
from typer import Option, Typer

from specdec import SpeculationStats
from specdec.lab.cli.options import Parts, Sampling, Target, count, text, ungrouped
from specdec.lab.evaluation.pictures import (
    inputs_of,
    is_processor,
    load_processor,
    message,
    open_pictures,
)
from specdec.lab.evaluation.prompts import reply_of
from specdec.lab.show.text import one_line, printable
from specdec.lab.show.tokens import colour_key, coloured_pieces

USUAL_TOKENS = 512
HELP = (
    "/reset begins again, /system TEXT says how to answer, /image PATH shows a picture, /quit "
    "ends; Ctrl-C ends an answer"
)


def chat(
    *,
    target: Target,
    system: Annotated[
        str | None, Option(parser=text, metavar="TEXT", help="how to answer; default: not said")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        count(f"at most, of an answer; default: {USUAL_TOKENS}, or half of the positions left"),
    ] = None,
    sampling: Sampling,
    parts: Parts,
) -> None:
    """Talk with a model, in the chat template of its tokenizer.

    Lines are read from the terminal or from a pipe. Options that are left out
    truncate and penalise nothing, as in specdec generate. A model that reads pictures gets those of
    /image, by its processor, and they stay in the conversation.
    """
    options = {"do_sample": sampling.temperature != 0, "neutral": True, **sampling.given(parts)}
    generator, tokenizer = parts.load(target)
    print(f"{colour_key(sys.stdout)}\n{HELP}")
    if not tokenizer.chat_template:
        print("the tokenizer has no chat template: what is said is one running text")
    processor, why_text = _processor_of(target)
    said: list[_Said] = []
    pictures: list[Any] = []  # of the next message
    for line in _lines():
        command, _, rest = line.partition(" ")
        if command == "/reset":
            said, pictures = [], []
        elif command == "/system":
            system = rest.strip() or None
        elif command == "/image":
            pictures += _opened(rest, why_text)
        elif command.startswith("/"):
            print(f"there is no {printable(command)}; {HELP}", file=sys.stderr)
        elif line.strip():
            turn, pictures = _Said("user", line, pictures), []
            try:
                inputs = _prompt(processor or tokenizer, system, [*said, turn], generator.target)
                most = _most_tokens(generator.target, inputs, max_new_tokens)
                told = {**options, "max_new_tokens": most}
                answer = _answer(generator, tokenizer, inputs, told)
                said += [turn, _Said("assistant", answer)]
            except ValueError as error:  # too long a conversation, for instance
                print(f"specdec: {one_line(error)}; {HELP}", file=sys.stderr)


class _Said(NamedTuple):
    """A turn of the conversation."""

    role: str
    text: str
    pictures: Sequence[Any] = ()


def _processor_of(target: str) -> tuple[Any, str]:
    """The processor of a target that reads pictures; else `None`, and why it can be given none."""
    try:
        return load_processor(target), ""
    except (ValueError, ImportError) as error:
        return None, one_line(error)


def _opened(path: str, why_text: str) -> list[Any]:
    """The picture of a path, as it is typed or dropped into a terminal. Says what it is, or why it
    cannot be shown to the model.
    """
    path = path.strip().strip("'\"")
    try:
        if why_text:
            raise ValueError(why_text)
        if not path:
            raise ValueError("/image PATH needs the path of a picture")
        (picture,) = open_pictures([Path(path).expanduser()])
    except ValueError as error:
        print(f"specdec: {one_line(error)}", file=sys.stderr)
        return []
    size = f"{picture.width} x {picture.height}"
    print(f"picture {printable(path)}, {size}, goes into the next message")
    return [picture]


def _lines() -> Iterator[str]:
    """What is typed, or comes from a pipe; /quit, Ctrl-C and the end of the input end it."""
    mark = "> " if sys.stdin.isatty() else ""
    with suppress(EOFError, KeyboardInterrupt):
        yield from iter(partial(input, mark), "/quit")


def _prompt(reads: Any, system: str | None, said: list[_Said], target: Any) -> dict[str, Any]:
    """What the model goes on from, by its processor where it `reads` pictures, else ids and mask by
    its tokenizer.
    """
    turns = [_Said("system", system)] if system else []
    turns += said
    if is_processor(reads):
        place = {"dtype": target.dtype, "device": target.device}
        return inputs_of(reads, [message(*turn) for turn in turns], **place)
    if not reads.chat_template:
        parts = [turn.text if turn.role == "user" else f"{turn.text}\n" for turn in turns]
        inputs = reads("".join(parts), return_tensors="pt")
    else:
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        form = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        try:
            inputs = reads.apply_chat_template(messages, **form)
        except Exception as error:  # templates raise errors of their own, of a system text too
            raise ValueError(f"the chat template raises an error: {one_line(error)}") from error
    return {name: inputs[name].to(target.device) for name in ("input_ids", "attention_mask")}


def _most_tokens(target: Any, inputs: dict[str, Any], asked: int | None) -> int:
    """Tokens that an answer may have: at most those that the target has positions for. Where
    nothing was asked, an answer takes at most half of them, so that a next turn fits.
    """
    limit, used = target.max_positions, inputs["input_ids"].shape[1]
    if limit is None:
        return asked or USUAL_TOKENS
    room = limit - used
    if room < 1:
        raise ValueError(
            f"the conversation has {used} tokens, and the target has {limit} positions: there is "
            "no room for an answer"
        )
    return min(asked, room) if asked else min(USUAL_TOKENS, max(1, room // 2))


def _answer(generator: Any, tokenizer: Any, inputs: dict[str, Any], options: dict[str, Any]) -> str:
    """Prints an answer as it comes, and its numbers; Ctrl-C ends it. Returns what the next turn's
    template gets.
    """
    plain = SimpleNamespace(decode=partial(tokenizer.decode, skip_special_tokens=True))
    steps, started_s = [], time.perf_counter()
    options = ({"seed": randbits(32)} if options["do_sample"] else {}) | options

    def arriving() -> Iterator[Any]:
        for record in generator.stream(**inputs, **options):
            steps.extend(record.rows)
            yield from record.rows

    with suppress(KeyboardInterrupt):
        for piece in coloured_pieces(plain, arriving(), sys.stdout):
            print(piece, end="", flush=True)
    wall_s = time.perf_counter() - started_s
    stats = SpeculationStats([steps], generator.drafter.num_draft_tokens, wall_s=wall_s)
    numbers = (
        f"{sum(stats.emitted)} tokens, {stats.tokens_per_s:.1f} tokens/s, acceptance length "
        f"{stats.acceptance_length:.2f}, {stats.block_efficiency:.2f} tokens per step, rate "
        f"{stats.acceptance_rate:.2f}" + (f", seed {options['seed']}" if "seed" in options else "")
    )
    Console(highlight=False, soft_wrap=True).print(f"\n{numbers}", style="dim")
    tokens = [token for step in steps for token in step.new_tokens]
    ends = generator.target.model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    return reply_of(tokens, tokenizer, is_ended=tokens[-1:] != [] and tokens[-1] in ends)


def main(arguments: list[str] | None = None) -> None:
    """Runs the program; a target or drafter that cannot be loaded is one line.

    Args:
        arguments: of the command line.
    """
    app = Typer(pretty_exceptions_enable=False)
    app.command()(ungrouped(chat))
    try:
        app(arguments, standalone_mode=arguments is None)
    except (ValueError, ImportError, OSError) as error:
        raise SystemExit(f"specdec: {one_line(error)}") from error


if __name__ == "__main__":
    main()
