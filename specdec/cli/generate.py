"""`specdec generate`: completes a prompt with models of one's own."""

from __future__ import annotations

import argparse
import sys

from specdec.cli.loading import load_generator
from specdec.cli.parser import add_generator_arguments, add_sampling_arguments, sampling_of, text


def add_parser(commands) -> None:
    """Adds the command to `argparse`'s subparsers."""
    parser = commands.add_parser(
        "generate",
        help="complete a prompt with models of your own",
        description="Completes a prompt. Sampling is neutral but for what is given, as in 'specdec "
        "evaluate': of the target's generation_config only the ids that end and pad a text are "
        "used.",
    )
    parser.add_argument("--target", required=True, help="folder or Hugging Face id, or 'zoo'")
    parser.add_argument("--prompt", type=text, required=True, help="text to complete")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="at most (default 128)")
    add_sampling_arguments(parser, seed="a random one, which is printed")
    add_generator_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0."""
    sampling = sampling_of(arguments)
    generator, tokenizer = load_generator(arguments)
    from specdec.show.tokens import colour_key, coloured_text

    inputs = tokenizer(arguments.prompt, return_tensors="pt").to(arguments.device)
    result = generator.generate(
        inputs.input_ids,
        inputs.get("attention_mask"),
        max_new_tokens=arguments.max_new_tokens,
        do_sample=arguments.temperature != 0,
        neutral=True,
        temperature=arguments.temperature,
        **sampling,
    )
    print(coloured_text(tokenizer, arguments.prompt, result.steps[0], sys.stdout))
    print("\n" + colour_key(sys.stdout))
    if result.seeds:
        print(f"seed {result.seeds[0]}")
    print(result.stats)
    return 0
