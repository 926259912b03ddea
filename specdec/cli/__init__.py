"""The command line: `specdec demo`, `generate`, `evaluate`, `reproduce`, `plan`, `certify`,
`inspect` and `train`.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from specdec.cli import certify, demo, evaluate, generate, inspect, plan, reproduce
from specdec.cli.parser import EXIT_INTERRUPTED, OneLineParser
from specdec.show.text import one_line

EXIT_BAD_INPUT = 2
EXIT_BROKEN_PIPE = 141
"""The exit status of shells for a program that SIGPIPE ended."""


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
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        return EXIT_BROKEN_PIPE
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"specdec: {one_line(error)}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("specdec: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(argv: list[str]) -> int:
    """Commands import models and all that computes when they run: help and mistakes come at once,
    and an interrupt meets `main`.
    """
    if argv[:1] == ["train"]:
        from specdec.cli.train import main as train

        return train(argv[1:], prog="specdec train")
    arguments = _parser().parse_args(argv)
    return arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="specdec", description="Lossless speculative decoding over Hugging Face models."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (demo, generate, evaluate, reproduce, plan, certify, inspect):
        command.add_parser(commands)
    commands.add_parser("train", help="train a head; see specdec train --help", add_help=False)
    return parser
