"""`specdec certify`: tries to show that a sampler and a pair of models are not lossless."""

from __future__ import annotations

import argparse
from functools import partial

from specdec.cli.loading import bar, load_generator
from specdec.cli.parser import add_generator_arguments, given, positive, refuse_given, text


def add_parser(commands) -> None:
    """Adds the command to `argparse`'s subparsers."""
    parser = commands.add_parser(
        "certify",
        help="enumerate a sampler's exact law, audit and test a pair of models",
        description="Enumerates the sampler's exact law on small worlds. Then runs the pair: "
        "greedy text against plain decoding, no random number used twice, the same drafts again, "
        "alone and in other company, and a chi-square test of sampled text against the target's "
        "exact law. Exits 1 if anything fails.",
    )
    add = parser.add_argument
    add("--target", default="zoo", help="folder or Hugging Face id, or 'zoo'")
    add("--prompt", type=text, action="append", help="text (several: repeat; default: source code)")
    add("--prompts", type=positive, help="of source code (default 2)")
    add("--prompt-tokens", type=positive, help="of these (default 8)")
    add("--samples", type=positive, default=4096, help="per prompt (default 4096)")
    add("--audit-tokens", type=positive, default=64, help="of audits (default 64)")
    add("--top-k", type=positive, default=4, help="while sampling (default 4)")
    add("--temperature", type=float, default=1.0, help="likewise (default 1)")
    add("--false-alarm", type=float, default=1e-6, help="in total (default 1e-6)")
    add_generator_arguments(parser, dtype="float32")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0 if nothing was found, else 1."""
    from specdec.arguments import check_number
    from specdec.certify import certify
    from specdec.certify.generator.law import NUM_TOKENS, check_enumerable

    check_number("--temperature", arguments.temperature, above=0)
    check_number("--false-alarm", arguments.false_alarm, above=0, below=1)
    if arguments.prompt:
        of_sources = "belongs to prompts of source code; leave it out beside --prompt"
        refuse_given(arguments, ("prompts", "prompt_tokens"), of_sources)
    generator, tokenizer = load_generator(arguments)
    if arguments.prompt:
        prompts = _distinct(arguments.prompt, tokenizer, None)
    else:
        prompts = _source_prompts(tokenizer, arguments.prompts or 2, arguments.prompt_tokens or 8)
    check_enumerable(NUM_TOKENS, arguments.top_k, generator.target.vocab_size)
    exact = certify(generator.sampler, device=arguments.device, progress=partial(bar, "exact law"))
    print(exact, flush=True)
    options = given(arguments, ("audit_tokens", "top_k", "temperature", "false_alarm"))
    options |= {"num_samples": arguments.samples, "progress": partial(bar, "samples")}
    runs = certify(generator, prompts, **options)
    print(runs)
    return 0 if exact.passed and runs.passed else 1


_MOST_SOURCES = 4096
"""Beginnings of source texts that are looked at; no library has more that differ."""


def _source_prompts(tokenizer, count: int, length: int) -> list[list[int]]:
    """Beginnings of source texts that the zoo's models have not seen. Sources begin alike, more so
    in tokens of another tokenizer, so those that are cut to the same ids are left out.
    """
    from specdec import zoo

    available = min(16 * count, _MOST_SOURCES)
    prompts = _distinct(zoo.heldout_prompts(available), tokenizer, length)
    if len(prompts) < count:
        raise ValueError(
            f"of {available} sources only {len(prompts)} begin with different {length} tokens; "
            "pass --prompt-tokens with a larger number, or prompts of your own with --prompt"
        )
    return prompts[:count]


def _distinct(texts: list[str], tokenizer, length: int | None) -> list[list[int]]:
    """Ids of each text, those that are equal to earlier ones left out."""
    encoded = dict.fromkeys(tuple(tokenizer(text).input_ids[:length]) for text in texts)
    return [list(ids) for ids in encoded]
