"""`specdec plan`: which K, which tree, at which batch size, for a target and a drafter."""

from __future__ import annotations

import argparse
from pathlib import Path

from specdec.cli.loading import load_generator
from specdec.cli.parser import add_generator_arguments, given, positive


def add_parser(commands) -> None:
    """Adds the command to `argparse`'s subparsers."""
    parser = commands.add_parser(
        "plan",
        help="say how much to draft, at which batch size",
        description="Predicts the speed over plain decoding of every K up to --num-draft-tokens, "
        "and of trees of every size up to --tree's, from counted steps and timed ones, and "
        "measures it for the best draft of each batch size.",
    )
    add = parser.add_argument
    add("--target", default="zoo", help="folder or Hugging Face id, or 'zoo' (default)")
    add("--prompts", type=Path, help="JSONL file (default: 16 prompts of specdec's own)")
    add("--max-new-tokens", type=positive, default=64, help="of each prompt (default 64)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default 0)")
    add("--batch-sizes", type=positive, nargs="+", help="rows (default: 1 and 8)")
    add("--rounds", type=positive, default=5, help="of each measurement (default 5)")
    add_generator_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0."""
    from specdec.evaluation import own_prompts, plan_drafts, read_prompts

    if arguments.drafter == "none":
        raise ValueError("plan compares lengths of drafts; name a --drafter")
    prompts = read_prompts(arguments.prompts) if arguments.prompts else own_prompts()
    if arguments.num_draft_tokens is None:
        arguments.num_draft_tokens = 8
    tree, arguments.tree = arguments.tree, None
    one, tokenizer = load_generator(arguments)
    generators = [one]
    if tree is not None:
        arguments.tree, arguments.num_draft_tokens = tree, None
        generators += [load_generator(arguments, (one.target.model, tokenizer))[0]]
    options = given(arguments, ("batch_sizes", "temperature", "max_new_tokens", "rounds"))
    print(plan_drafts(generators, prompts, tokenizer=tokenizer, progress=True, **options))
    return 0
