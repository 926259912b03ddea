"""`specdec evaluate`: measures acceptance and speed over a file of prompts."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from specdec.cli.loading import load_generator
from specdec.cli.parser import (
    add_generator_arguments,
    add_sampling_arguments,
    given,
    json_object,
    positive,
    sampling_of,
)
from specdec.show.table import need

FORMATS = ("text", "markdown", "latex", "json")


def add_parser(commands) -> None:
    """Adds the command to `argparse`'s subparsers."""
    parser = commands.add_parser(
        "evaluate",
        help="measure acceptance and speed over prompts, with intervals",
        description="Generates from every prompt and prints acceptance length, rates by draft "
        "position and tokens per second with bootstrap intervals, by category. Prompts are JSONL, "
        "JSON or Parquet of SPEED-Bench, Spec-Bench, MT-bench, HumanEval, GSM8K, MATH-500, Alpaca "
        "and others as published, or lines with 'text'. With --output a run that was interrupted "
        "goes on where it stopped.",
    )
    add = parser.add_argument
    add("--target", default="zoo", help="folder or Hugging Face id, or 'zoo' (default)")
    add("--prompts", type=Path, help="file or folder (default: 16 prompts of specdec's own)")
    add(
        "--limit",
        type=positive,
        help="so many prompts, evenly over the categories (default: all)",
    )
    add("--max-new-tokens", type=int, default=128, help="of each turn (default 128)")
    add("--max-prompt-tokens", type=int, help="cut longer prompts on the left (default: no)")
    add(
        "--chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        help="""variables of the chat template: '{"enable_thinking": false}' (default: none)""",
    )
    add_sampling_arguments(parser, seed="0; prompt i has one i higher")
    add("--batch-size", type=int, default=1, help="prompts at a time (default 1)")
    add("--warmup", type=int, default=1, help="batches generated before measuring (default 1)")
    add("--output", type=Path, help="JSONL file of the run, to go on with (default: none)")
    add("--format", choices=FORMATS, default="text", help="of what is printed (default text)")
    add_generator_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0."""
    sampling = sampling_of(arguments)
    from specdec import evaluate
    from specdec.evaluation import own_prompts, read_prompts
    from specdec.evaluation.intervals import counted
    from specdec.evaluation.run_file import RunFile

    # What would fail at the end is refused before models are loaded.
    if arguments.output is not None:
        with RunFile(arguments.output).held():
            pass
    if arguments.format == "latex":
        need("pandas", "--format latex")
    prompts = read_prompts(arguments.prompts) if arguments.prompts else own_prompts()
    if arguments.limit is not None:
        chosen = _first_of_each(prompts, arguments.limit)
        count = f"{len(chosen)} of {counted(len(prompts), 'prompt')}"
        print(f"measuring {count}, --limit {arguments.limit}", file=sys.stderr)
        prompts = chosen
    generator, tokenizer = load_generator(arguments)
    sizes = ("max_new_tokens", "max_prompt_tokens", "batch_size", "warmup")
    names = ("temperature", "chat_template_kwargs", "output", *sizes)
    options = sampling | given(arguments, names)
    evaluation = evaluate(generator, prompts, tokenizer=tokenizer, progress=True, **options)
    sys.stderr.flush()
    if arguments.format == "json":
        estimates = {name: value.to_dict() for name, value in evaluation.estimates.items()}
        print(json.dumps({**evaluation.about, "estimates": estimates}, indent=2))
    else:
        print(getattr(evaluation, f"to_{arguments.format}")())
    return 0


def _first_of_each(prompts: list, limit: int) -> list:
    """The first `limit` prompts, as evenly over the categories as they can be had."""
    seen: Counter[str] = Counter()
    ranks = []
    for prompt in prompts:
        ranks.append(seen[prompt.category])
        seen[prompt.category] += 1
    firsts = sorted(range(len(prompts)), key=ranks.__getitem__)[:limit]  # of each, then seconds
    return [prompts[index] for index in sorted(firsts)]
