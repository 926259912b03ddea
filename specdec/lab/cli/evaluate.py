"""`specdec evaluate`: measures acceptance and speed over a file of prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from specdec.lab.cli.options import Format, Parts, PromptFile, Sampling, Target, count, json_object
from specdec.lab.show.table import Table, need

TEMPLATE = """of the chat template, '{"enable_thinking": false}' for instance; default: none"""


def evaluate(
    *,
    target: Target = "zoo",
    prompts: PromptFile = None,
    limit: Annotated[int | None, count("prompts, evenly over categories; default: all")] = None,
    max_new_tokens: Annotated[int, Option(help="of each turn")] = 128,
    max_prompt_tokens: Annotated[int | None, Option(help="the last so many; default: all")] = None,
    chat_template_kwargs: Annotated[
        Any, Option(parser=json_object, metavar="JSON", help=TEMPLATE)
    ] = None,
    batch_size: Annotated[int, Option(help="prompts at a time")] = 1,
    warmup: Annotated[int, Option(help="batches generated before measuring")] = 1,
    output: Annotated[Path | None, Option(help="JSONL of the run; default: none")] = None,
    format: Format = "text",
    sampling: Sampling,
    parts: Parts,
) -> None:
    """Measure acceptance and speed over prompts, with intervals.

    Generates from every prompt and prints acceptance length, rates by draft position and tokens
    per second with bootstrap intervals, by category. Prompts are JSONL, JSON or Parquet of
    SPEED-Bench, Spec-Bench, MT-bench, HumanEval, GSM8K, MATH-500, Alpaca and others as published,
    or lines with 'text'; 'images' beside these are paths of pictures, seen from the file. With
    --output a run that was interrupted goes on where it stopped, and all processes with one
    --output share the prompts, as do those of accelerate launch.
    """
    options = sampling.given(parts)
    from specdec import evaluate
    from specdec.lab.evaluation import own_prompts, read_prompts
    from specdec.lab.evaluation.intervals import counted
    from specdec.lab.evaluation.prompts import processor_for
    from specdec.lab.evaluation.run_file import RunFile

    # A file that cannot be written at the end raises an error before models are loaded.
    if output is not None:
        with RunFile(output).joined():
            pass
    if format == "latex":
        need("pandas", "--format latex")
    chosen = read_prompts(prompts) if prompts else own_prompts()
    if limit is not None:
        every, chosen = chosen, _first_of_each(chosen, limit)
        taken = f"{len(chosen)} of {counted(len(every), 'prompt')}"
        print(f"measuring {taken}, --limit {limit}", file=sys.stderr)
    reader = processor_for(target, chosen)
    generator, tokenizer = parts.load(target)
    options |= {"chat_template_kwargs": chat_template_kwargs, "output": output, "warmup": warmup}
    options |= {"max_new_tokens": max_new_tokens, "max_prompt_tokens": max_prompt_tokens}
    options |= {"batch_size": batch_size, "tokenizer": reader or tokenizer}
    evaluation = evaluate(generator, chosen, share=True, progress=True, **options)
    sys.stderr.flush()
    estimates = {name: value.to_dict() for name, value in evaluation.estimates.items()}
    print_as(format, evaluation.tables(), {**evaluation.about, "estimates": estimates})


def print_as(format: str, tables: list[Table], content: dict[str, Any]) -> None:
    """Prints tables in one of the `Format`s, once where several processes have them; `content` is
    what they show in JSON.
    """
    from specdec.processes import team

    forms = {"text": str, "markdown": Table.markdown, "latex": Table.latex}
    if team().is_first:
        parts = [forms[format](table) for table in tables] if format in forms else ()
        print("\n\n".join(parts) or json.dumps(content, indent=2))


def _first_of_each(prompts: list, limit: int) -> list:
    """The first `limit` prompts, as evenly over the categories as they can be had."""
    ranks = [  # how many of its category come before each
        sum(other.category == prompt.category for other in prompts[:index])
        for index, prompt in enumerate(prompts)
    ]
    firsts = sorted(range(len(prompts)), key=ranks.__getitem__)[:limit]  # of each, then seconds
    return [prompts[index] for index in sorted(firsts)]
