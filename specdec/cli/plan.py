"""`specdec plan`: which K, which tree, at which batch size, for a target and a drafter."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from specdec.cli.options import Parts, PromptFile, Target, Temperature, count, several


def plan(
    *,
    target: Target = "zoo",
    prompts: PromptFile = None,
    max_new_tokens: Annotated[int, count("of each prompt")] = 64,
    temperature: Temperature = 0.0,
    batch_sizes: Annotated[Any, several("rows", int, "1,8")] = "1,8",
    rounds: Annotated[int, count("of each measurement")] = 5,
    parts: Parts,
) -> None:
    """Say how much to draft, at which batch size.

    Predicts the speed over plain decoding of every K up to --num-draft-tokens (default 8), and of
    trees of every size up to --tree's, from counted steps and timed ones, and measures it for the
    best draft of each batch size.
    """
    from specdec.evaluation import own_prompts, plan_drafts, read_prompts

    if parts.drafter == "none":
        raise ValueError("plan compares lengths of drafts; name a --drafter")
    texts = read_prompts(prompts) if prompts else own_prompts()
    chains = replace(parts, tree=None, num_draft_tokens=parts.num_draft_tokens or 8)
    one, tokenizer = chains.load(target)
    generators = [one]
    if parts.tree is not None:
        trees = replace(parts, num_draft_tokens=None)
        generators += [trees.load(target, (one.target.model, tokenizer))[0]]
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "rounds": rounds}
    options |= {"batch_sizes": batch_sizes, "tokenizer": tokenizer, "progress": True}
    print(plan_drafts(generators, texts, **options))
