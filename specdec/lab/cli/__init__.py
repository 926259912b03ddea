"""The command line: `specdec generate`, `evaluate`, and others, each in a module of its name."""

from __future__ import annotations

import io
import os
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from importlib.metadata import version as version_of
from typing import Annotated, Any

import typer

from specdec import __version__
from specdec.lab.cli.ablate import ablate
from specdec.lab.cli.answers import answers
from specdec.lab.cli.certify import certify
from specdec.lab.cli.demo import demo
from specdec.lab.cli.evaluate import evaluate
from specdec.lab.cli.generate import generate
from specdec.lab.cli.inspect import inspect
from specdec.lab.cli.options import ungrouped
from specdec.lab.cli.train import train
from specdec.lab.cli.zoo import zoo
from specdec.lab.show.text import one_line, printable

COMMANDS = demo, generate, evaluate, ablate, certify, inspect, zoo, answers, train
"""Functions import models and all that computes when they run, so that help comes at once."""
INPUT_ERRORS = (ValueError, TypeError, OSError, ImportError, FloatingPointError, ArgumentError)
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 130, 141
"""The exit status of shells for a program that SIGINT or SIGPIPE ended."""
UsageError: Any = typer.BadParameter.__base__


def app() -> typer.Typer:
    """The commands."""
    commands = typer.Typer(pretty_exceptions_enable=False)
    commands.callback()(_specdec)
    for function in COMMANDS:
        # Only `train` passes on what it does not know, to Hugging Face's own arguments.
        settings = dict.fromkeys(["allow_extra_args", "ignore_unknown_options"], function is train)
        paragraphs = [" ".join(text.split()) for text in (function.__doc__ or "").split("\n\n")]
        command = commands.command(help="\n\n".join(paragraphs), context_settings=settings)
        command(ungrouped(function))
    return commands


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        Exit code: 0, or 2 for input that cannot be right (with one line on standard error), or 1
        when the demo's outputs differ or a certificate fails, or 130 after an interrupt, or 141
        when the reader of the output ended first.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()  # for `>&-`
    code, message = EXIT_BAD_INPUT, ""
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        code = EXIT_BROKEN_PIPE
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else "specdec"
        message = f"{printable(error.format_message()).rstrip('.')}; see {command} --help"
    except INPUT_ERRORS as error:
        message = one_line(error)
    except KeyboardInterrupt as error:
        code, message = EXIT_INTERRUPTED, "interrupted"
        if str(error):  # of a training run, which was saved
            message += f": {error}; the same command goes on from there"
    if message:
        print(f"specdec: {message}", file=sys.stderr)
    return code


def _run(argv: list[str]) -> int:
    """The exit code of a command. Typer's own `main` would end the process and hide interrupts."""
    command = typer.main.get_command(app())
    if "_SPECDEC_COMPLETE" in os.environ:
        command.main(argv, "specdec")
    try:
        with command.make_context("specdec", argv) as context:
            return command.invoke(context) or 0
    except typer.Exit as end:
        return end.exit_code


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        others = (f"{name} {version_of(name)}" for name in ("torch", "transformers"))
        print(f"specdec-torch {__version__}", *others, sep=", ")
        raise typer.Exit


def _specdec(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="and exit")
    ] = False,
) -> None:
    """Lossless speculative decoding over Hugging Face models."""
