"""What the commands' parsers have in common."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NoReturn

from specdec.show.text import printable

DTYPES = ("float32", "float64", "bfloat16", "float16")
SAMPLERS = ("auto", "rejection", "block", "coupling", "typical", "ensemble")
DRAFTERS_HELP = (
    "folder or id of a draft model; 'eagle:', 'mask-token:' or 'mtp:' and that of a head (in local "
    "folders the first two are recognised); 'lookup' (prompt lookup), 'none', or for the target "
    "'zoo' one of its drafters, zoo:model, zoo:eagle3, zoo:mask-token, zoo:mtp"
)
DRAWING = ("proposal", "draft_temperature")
"""Options of drafters that have probabilities."""
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


def add_model_arguments(parser: argparse.ArgumentParser, *, dtype: str = "auto") -> None:
    """`--dtype` and `--device`."""
    choices = ("auto", *DTYPES) if dtype == "auto" else DTYPES
    parser.add_argument("--dtype", choices=choices, default=dtype, help=f"default: {dtype}")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...; default: cpu")


def add_sampler_arguments(parser: argparse.ArgumentParser) -> None:
    """`--sampler`, and the weight of one of them."""
    parser.add_argument(
        "--sampler",
        choices=SAMPLERS,
        default="auto",
        help="rule of acceptance (default auto: block)",
    )
    parser.add_argument("--target-weight", type=float, help="of --sampler ensemble (default 0.9)")


def add_drafter_arguments(parser: argparse.ArgumentParser) -> None:
    """`--drafter`, K, and how it draws its tokens."""
    add = parser.add_argument
    add("--drafter", help=f"{DRAFTERS_HELP} (default: zoo:model for the zoo, lookup for others)")
    add("--num-draft-tokens", type=int, help="K (default 4)")
    add(
        "--proposal",
        choices=("sample", "argmax"),
        help="draft tokens are drawn, or the likeliest ones (default: sample)",
    )
    add("--draft-temperature", type=float, help="of the drafter (default: the target's)")


def sampler_of(arguments: argparse.Namespace):
    """The sampler of the arguments that `add_sampler_arguments` adds."""
    from specdec.samplers import EnsembleSampler, sampler_named

    weight = arguments.target_weight
    if arguments.sampler == "ensemble":
        return EnsembleSampler(0.9 if weight is None else weight)
    refuse_given(arguments, ("target_weight",), "belongs to --sampler ensemble")
    return sampler_named(arguments.sampler)


def add_sampling_arguments(parser: argparse.ArgumentParser, *, seed: str) -> None:
    """`--temperature`, and what belongs to sampling.

    Args:
        parser: of the command.
        seed: the default, in words.
    """
    add = parser.add_argument
    add("--temperature", type=float, default=0.0, help="0 is greedy (default 0)")
    add("--top-k", type=int, help="keep so many tokens (default: all)")
    add("--top-p", type=float, help="keep the likeliest tokens of this mass (default: all)")
    add("--min-p", type=float, help="keep tokens of this share of the likeliest's (default: all)")
    add("--seed", type=int, help=f"of sampling (default: {seed})")


def sampling_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `add_sampling_arguments` was given, but for the temperature.

    Raises:
        ValueError: an option of sampling, and no temperature to sample with.
    """
    names = ("top_k", "top_p", "min_p", "seed")
    if arguments.temperature == 0:
        refuse_given(
            arguments,
            (*names, *DRAWING),
            "belongs to sampling; pass a --temperature above 0 with it",
        )
    given = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def refuse_given(arguments: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Refuses options that were given and would have no effect.

    Args:
        arguments: where an option that was not given is `None`.
        names: of the options.
        why: they have none.

    Raises:
        ValueError: one was given.
    """
    for name in names:
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} {why}")
