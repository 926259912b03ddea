"""What the commands' parsers have in common."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NoReturn

from specdec.show.text import printable

DTYPES = ("float32", "float64", "bfloat16", "float16")
SAMPLERS = ("auto", "rejection", "block", "coupling", "typical", "ensemble")
DRAFTERS_HELP = (
    "folder or id of a draft model; 'eagle:', 'mask-token:' or 'mtp:' and that of a head (in local "
    "folders the first two are recognised); 'lookup' (prompt lookup), 'none', or for the target "
    "'zoo' one of its drafters, zoo:model, zoo:eagle3, zoo:mask-token, zoo:mtp"
)
TREE_HELP = "draft trees, for instance of 32x6: 32 nodes, paths of 6 (default: chains of K tokens)"
DRAWING = ("proposal", "draft_temperature")
"""Options of drafters that have probabilities."""
TRAINING_STEPS = 10_000
"""Of a training run without `--steps` and `--minutes`."""
LONGEST_ROWS = 4096
"""Tokens of the longest rows of a training run without `--length`: targets may have a hundred times
as many positions, and attention over such rows takes the memory of all others.
"""
EXIT_INTERRUPTED = 130
"""The exit status of shells for a program that SIGINT ended."""


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, and not the usage as well."""

    def error(self, message: str) -> NoReturn:
        """Exits with status 2."""
        self.exit(2, f"error: {printable(message)}; see --help\n")


def text(argument: str) -> str:
    """The type of arguments that are text; bytes that are not UTF-8 reach Python as surrogates."""
    if any("\ud800" <= character <= "\udfff" for character in argument):
        raise argparse.ArgumentTypeError(f"expected text in UTF-8, got {argument[:40]!a}")
    return argument


def positive(argument: str) -> int:
    """The type of arguments that are integers above 0."""
    if not argument.isdecimal() or int(argument) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {argument}")
    return int(argument)


def json_object(argument: str) -> dict[str, Any]:
    """The type of arguments that are objects in JSON."""
    with suppress(ValueError):
        if isinstance(found := json.loads(argument), dict):
            return found
    raise argparse.ArgumentTypeError(f"must be an object in JSON, got {argument}")


def tree_size(argument: str) -> tuple[int, int]:
    """The type of `--tree`: nodes and depth."""
    nodes, _, depth = argument.partition("x")
    if not (nodes.isdecimal() and depth.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be nodes and depth like 32x6, got {argument}")
    return int(nodes), int(depth)


def add_place_arguments(parser: argparse.ArgumentParser, *, dtype: str = "auto") -> None:
    """`--dtype` and `--device` of models."""
    choices = ("auto", *DTYPES) if dtype == "auto" else DTYPES
    parser.add_argument("--dtype", choices=choices, default=dtype, help=f"default: {dtype}")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...; default: cpu")


def add_generator_arguments(parser: argparse.ArgumentParser, **place: str) -> None:
    """Drafter, K, how drafts are drawn, the sampler, data type and device."""
    add = parser.add_argument
    add("--drafter", help=f"{DRAFTERS_HELP} (default: zoo:model for the zoo, lookup for others)")
    add("--num-draft-tokens", type=int, help="K (default 4)")
    add("--tree", type=tree_size, metavar="NODESxDEPTH", help=TREE_HELP)
    add(
        "--proposal",
        choices=("sample", "argmax"),
        help="draft tokens are drawn, or the likeliest ones (default: sample)",
    )
    add("--draft-temperature", type=float, help="of the drafter (default: the target's)")
    add("--sampler", choices=SAMPLERS, default="auto", help="acceptance rule (default auto: block)")
    add("--target-weight", type=float, help="of --sampler ensemble (default 0.9)")
    add_place_arguments(parser, **place)


def add_sampling_arguments(parser: argparse.ArgumentParser, *, seed: str) -> None:
    """Adds `--temperature` (0 by default, greedy), `--top-k`, `--top-p`, `--min-p` and `--seed`;
    `seed` says in the help what happens without the last.
    """
    add = parser.add_argument
    add("--temperature", type=float, default=0.0, help="0 is greedy (default 0)")
    add("--top-k", type=int, help="keep so many tokens (default: all)")
    add("--top-p", type=float, help="keep the likeliest tokens of this mass (default: all)")
    add("--min-p", type=float, help="keep tokens of this share of the likeliest's (default: all)")
    add("--seed", type=int, help=f"of sampling (default: {seed})")


def sampling_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `add_sampling_arguments` was given, but for the temperature; refuses any of it where the
    temperature is 0.
    """
    names = ("top_k", "top_p", "min_p", "seed")
    if arguments.temperature == 0:
        why = "belongs to sampling; pass a --temperature above 0 with it"
        refuse_given(arguments, (*names, *DRAWING), why)
    return given(arguments, names)


def given(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of the options that were given; the others are `None`."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def refuse_given(arguments: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raises `ValueError` for an option that was given and would have no effect; says why."""
    for name in given(arguments, names):
        raise ValueError(f"--{name.replace('_', '-')} {why}")
