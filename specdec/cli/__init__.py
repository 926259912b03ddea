"""The command line: `specdec demo`, `generate`, `evaluate`, `certify` and `inspect`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from specdec.cli import certify, demo, evaluate, generate, inspect
from specdec.cli.loading import one_line

EXIT_BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        Exit code: 0, or 2 for input that cannot be right (with one line on standard error), or 1
        when the demo's outputs differ or a certificate fails.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, TypeError, OSError) as error:
        print(f"specdec: {one_line(error)}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specdec", description="Lossless speculative decoding over Hugging Face models."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (demo, generate, evaluate, certify, inspect):
        command.add_parser(commands)
    return parser
