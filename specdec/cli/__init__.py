"""The command line: `specdec demo`, `generate`, `evaluate`, `certify`, `inspect` and `train`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from specdec.cli import certify, demo, evaluate, generate, inspect
from specdec.cli.loading import one_line
from specdec.cli.parser import EXIT_INTERRUPTED, OneLineParser

EXIT_BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        Exit code: 0, or 2 for input that cannot be right (with one line on standard error), or 1
        when the demo's outputs differ or a certificate fails, or 130 after an interrupt.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["train"]:  # training is imported by those who train
        from specdec.cli.train import main as train

        return train(argv[1:], prog="specdec train")
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, TypeError, OSError) as error:
        print(f"specdec: {one_line(error)}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("specdec: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="specdec", description="Lossless speculative decoding over Hugging Face models."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (demo, generate, evaluate, certify, inspect):
        command.add_parser(commands)
    commands.add_parser("train", help="train a head; see specdec train --help", add_help=False)
    return parser
