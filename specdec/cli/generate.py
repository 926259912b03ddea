"""`specdec generate`: completes a prompt with models of one's own."""

from __future__ import annotations

import sys
from typing import Annotated

from typer import Option

from specdec.cli.options import Parts, Prompt, Sampling, Target


def generate(
    *,
    target: Target,
    prompt: Prompt,
    max_new_tokens: Annotated[int, Option(help="at most")] = 128,
    sampling: Sampling,
    parts: Parts,
) -> None:
    """Complete a prompt with models of your own.

    Sampling is neutral but for what is given, as in specdec evaluate: of the target's
    generation_config only the ids that end and pad a text are used.
    """
    options = sampling.given(parts)
    generator, tokenizer = parts.load(target)
    from specdec.show.tokens import colour_key, coloured_text

    inputs = tokenizer(prompt, return_tensors="pt").to(parts.device)
    options |= {"do_sample": sampling.temperature != 0, "neutral": True}
    result = generator.generate(
        inputs.input_ids, inputs.get("attention_mask"), max_new_tokens=max_new_tokens, **options
    )
    print(coloured_text(tokenizer, prompt, result.steps[0], sys.stdout))
    print("\n" + colour_key(sys.stdout))
    if result.seeds:
        print(f"seed {result.seeds[0]}")
    print(result.stats)
