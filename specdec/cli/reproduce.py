"""`specdec reproduce`: measures what a paper measured, beside its figures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from specdec.cli.evaluate import FORMATS
from specdec.cli.loading import load_generator
from specdec.cli.parser import DRAFTERS_HELP, add_place_arguments, given, positive
from specdec.show.table import need

NAMES = ("dspark-table1", "ddtree", "ddtree-sampled", "speculators-mt-bench")
"""Of `PROTOCOLS`, which takes importing torch."""


def add_parser(commands) -> None:
    """Adds the command to `argparse`'s subparsers."""
    parser = commands.add_parser(
        "reproduce",
        help="measure what a paper measured, beside its figures",
        description="Follows the protocol of DSpark's table 1, of DDTree's budget sweep, at "
        "temperature 0 or 1, or of vLLM's test of speculators' heads, and prints the acceptance "
        "lengths with intervals beside the published ones, and in what the measurement differs. "
        "With --output a run that was interrupted goes on where it stopped.",
    )
    add = parser.add_argument
    add("protocol", choices=NAMES, help="what is reproduced")
    add("--target", default="zoo", help="folder or Hugging Face id, or 'zoo' (default)")
    add("--drafter", required=True, help=DRAFTERS_HELP)
    add("--data", type=Path, required=True, help="folder with a file or folder for each set")
    add("--sets", nargs="+", help="some of the protocol's (default: all)")
    add("--budgets", nargs="+", type=int, help="tree nodes, 0 for chains (default: all)")
    add("--limit", type=positive, help="so many prompts of each set (default: the protocol's)")
    add("--max-new-tokens", type=positive, help="of each turn (default: the protocol's)")
    add("--max-prompt-tokens", type=positive, help="cut longer ones on the left (default: no)")
    add("--batch-size", type=positive, default=1, help="prompts at a time (default 1)")
    add("--output", type=Path, help="folder of the runs, to go on with (default: none)")
    add("--format", choices=FORMATS, default="text", help="of what is printed (default text)")
    add_place_arguments(parser)
    parser.set_defaults(run=run, sampler="rejection", target_weight=None, draft_temperature=None)


def run(arguments: argparse.Namespace) -> int:
    """0."""
    from specdec.evaluation.protocols import PROTOCOLS, reproduce

    protocol, loaded = PROTOCOLS[arguments.protocol], None
    if arguments.format == "latex":
        need("pandas", "--format latex")
    arguments.proposal = None if protocol.proposal == "sample" else protocol.proposal

    def load(nodes: int):
        nonlocal loaded
        k = protocol.num_draft_tokens
        # As many children as nodes, so that the tree holds the best nodes of all.
        arguments.tree = (nodes, k, nodes) if nodes else None
        arguments.num_draft_tokens = None if nodes else k
        generator, tokenizer = load_generator(arguments, loaded)
        loaded = generator.target.model, tokenizer
        return generator, tokenizer

    sizes = ("limit", "max_new_tokens", "max_prompt_tokens", "batch_size")
    options = given(arguments, ("output", "sets", "budgets", *sizes))
    found = reproduce(protocol, load, arguments.data, progress=True, **options)
    if arguments.format == "json":
        print(json.dumps({"source": protocol.source, "cells": found.records()}, indent=2))
    else:
        print(getattr(found, f"to_{arguments.format}")())
    return 0
