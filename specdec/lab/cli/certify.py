"""`specdec certify`: tries to show that a sampler and a pair of models are not lossless."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from specdec.lab.cli.options import DType, Parts, Prompts, Target, count, refuse


@dataclass
class ExactParts(Parts):
    """In a data type whose rounding does not hide faults."""

    dtype: DType = "float32"


def certify(
    *,
    target: Target = "zoo",
    prompt: Prompts = None,
    prompts: Annotated[int | None, count("of source code; default: 2")] = None,
    prompt_file: Annotated[
        Path | None, Option(metavar="FILE", help="as in specdec evaluate; default: source code")
    ] = None,
    prompt_tokens: Annotated[int | None, count("of these; default: 8")] = None,
    samples: Annotated[int, count("texts per prompt")] = 64,
    max_new_tokens: Annotated[int, count("of each of these texts")] = 64,
    audit_tokens: Annotated[int, count("of audits")] = 64,
    temperature: Annotated[float, Option(metavar="T", help="of sampling")] = 1.0,
    top_k: Annotated[int | None, count("while sampling; default: all")] = None,
    top_p: Annotated[float | None, Option(metavar="P", help="while sampling; default: 1")] = None,
    target_bias: Annotated[
        float | None, Option(metavar="TV", help="total variation to be seen; default: none")
    ] = None,
    until_sure: Annotated[bool, Option(help="go on until --target-bias would be seen")] = False,
    false_alarm: Annotated[float, Option(metavar="P", help="in total")] = 1e-6,
    parts: ExactParts,
) -> int:
    """Enumerate a sampler's exact law, audit and test a pair of models.

    Enumerates the sampler's exact law on toy problems. Then runs the pair: greedy text against
    Hugging Face's own forward, no random number used twice, the same drafts again, alone and in
    other company, and bets along sampled texts against the target's own distributions. Says how
    small a bias would have been seen. Exits 1 if anything fails, or a lossy rule loses.
    """

    from specdec.arguments import check_number
    from specdec.lab.certificates import certify
    from specdec.lab.evaluation.prompts import processor_for, read_prompts

    check_number("--temperature", temperature, above=0)
    check_number("--false-alarm", false_alarm, above=0, below=1)
    if target_bias is not None:
        check_number("--target-bias", target_bias, above=0, below=1)
    elif until_sure:
        raise ValueError("--until-sure goes on until --target-bias would have been seen; pass one")
    if prompt or prompt_file:
        own = "--prompt" if prompt else "--prompt-file"
        of_sources = f"belongs to prompts of source code; leave it out beside {own}"
        refuse({"prompts": prompts, "prompt_tokens": prompt_tokens}, of_sources)
    if prompt and prompt_file:
        raise ValueError("--prompt and --prompt-file both say what prompts are; pass one of them")
    records = read_prompts(prompt_file) if prompt_file else []
    processor = processor_for(target, records)
    generator, tokenizer = parts.load(target)
    if records:
        ids = _first_turns(records, processor or tokenizer, generator.target.dtype)
    elif prompt:
        ids = _distinct(prompt, tokenizer, None)
    else:
        ids = _source_prompts(tokenizer, prompts or 2, prompt_tokens or 8)
    exact = certify(generator.sampler, device=parts.device)
    print(exact, flush=True)
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    settings = {name: value for name, value in settings.items() if value is not None}
    options = {"audit_tokens": audit_tokens, "settings": [settings], "false_alarm": false_alarm}
    options |= {"num_samples": samples, "max_new_tokens": max_new_tokens}
    options |= {"target_bias": target_bias, "until_sure": until_sure}
    runs = certify(generator, ids, **options)
    print(runs)
    return 0 if exact.passed and runs.passed else 1


_MOST_SOURCES = 4096
"""Beginnings of source texts that are looked at; no library has more that differ."""


def _source_prompts(tokenizer, count: int, length: int) -> list[list[int]]:
    """Beginnings of source texts that the zoo's models have not seen. Sources begin alike, more so
    in tokens of another tokenizer, so those that are cut to the same ids are left out.
    """
    from specdec.lab import zoo

    available = min(16 * count, _MOST_SOURCES)
    prompts = _distinct(zoo.heldout_prompts(available), tokenizer, length)
    if len(prompts) < count:
        raise ValueError(
            f"of {available} sources only {len(prompts)} begin with different {length} tokens; "
            "pass --prompt-tokens with a larger number, or prompts of your own with --prompt"
        )
    return prompts[:count]


def _first_turns(records: list[Any], reader: Any, dtype: Any) -> list[Any]:
    """Ids of each prompt's first turn, or what the target's processor makes of it."""
    from specdec.lab.evaluation.prompts import read

    both = [read(prompt, [], reader, dtype=dtype) for prompt in records]
    return [ids if inputs is None else inputs for ids, inputs in both]


def _distinct(texts: list[str], tokenizer, length: int | None) -> list[list[int]]:
    """Ids of each text, those that are equal to earlier ones left out."""
    encoded = dict.fromkeys(tuple(tokenizer(text).input_ids[:length]) for text in texts)
    return [list(ids) for ids in encoded]
