"""`specdec answers`: what a target answers to prompts, the text that its heads should learn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from specdec.lab.cli.evaluate import TEMPLATE
from specdec.lab.cli.options import Parts, PromptFile, Sampling, Target, count, json_object


def answers(
    *,
    target: Target = "zoo",
    prompts: PromptFile = None,
    output: Annotated[Path, Option(help=".jsonl file for specdec train --data")],
    max_new_tokens: Annotated[int, Option(help="of each turn")] = 512,
    max_prompt_tokens: Annotated[int | None, Option(help="the last so many; default: all")] = None,
    chat_template_kwargs: Annotated[
        Any, Option(parser=json_object, metavar="JSON", help=TEMPLATE)
    ] = None,
    batch_size: Annotated[int, count("prompts at a time, of like length")] = 8,
    samples: Annotated[int, count("answers of each prompt")] = 1,
    sampling: Sampling,
    parts: Parts,
) -> None:
    """Write the target's answers to prompts: specdec answers --prompts ... --output texts.jsonl

    A line of JSON per answer: all of its text, chat template included, for training, the answer
    alone, why it ended. The text is the target's whatever drafts it. A run that was interrupted
    goes on when it is started again; any number of processes with one --output share the prompts.
    At the end: how long the answers are, how many were cut off, how much they repeat
    themselves.
    """
    from specdec.lab.evaluation import own_prompts, read_prompts, write_answers
    from specdec.processes import team

    options = sampling.given(parts)
    options |= {"max_new_tokens": max_new_tokens, "max_prompt_tokens": max_prompt_tokens}
    options |= {"chat_template_kwargs": chat_template_kwargs, "batch_size": batch_size}
    chosen = read_prompts(prompts) if prompts else own_prompts()
    generator, tokenizer = parts.load(target)
    options |= {"tokenizer": tokenizer, "samples": samples, "share": True, "progress": True}
    found = write_answers(generator, chosen, output, **options)
    if team().is_first:
        print(found)
