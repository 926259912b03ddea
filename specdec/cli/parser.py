"""What the commands' parsers have in common."""

from __future__ import annotations

import argparse
from typing import NoReturn

DTYPES = ("float32", "float64", "bfloat16", "float16")
SAMPLERS = ("auto", "rejection", "block", "coupling", "typical", "ensemble")
EXIT_INTERRUPTED = 130
"""The exit status of shells for a program that SIGINT ended."""


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, and not the usage as well."""

    def error(self, message: str) -> NoReturn:
        """Exits with status 2."""
        self.exit(2, f"error: {message}; see --help\n")


def add_model_arguments(parser: argparse.ArgumentParser, *, dtype: str = "auto") -> None:
    """`--dtype` and `--device`."""
    choices = ("auto", *DTYPES) if dtype == "auto" else DTYPES
    parser.add_argument("--dtype", choices=choices, default=dtype, help=f"default: {dtype}")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...; default: cpu")


def add_sampler_arguments(parser: argparse.ArgumentParser) -> None:
    """`--sampler`, and the weight of one of them."""
    parser.add_argument("--sampler", choices=SAMPLERS, default="auto")
    parser.add_argument(
        "--target-weight", type=float, default=0.9, help="of the ensemble sampler (default 0.9)"
    )


def sampler_of(arguments: argparse.Namespace):
    """The sampler of the arguments that `add_sampler_arguments` adds."""
    from specdec.samplers import EnsembleSampler, sampler_named

    if arguments.sampler == "ensemble":
        return EnsembleSampler(arguments.target_weight)
    return sampler_named(arguments.sampler)
