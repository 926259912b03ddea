"""`specdec demo`: completes prompts plainly and with every drafter of the zoo, and compares."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated, Literal

from typer import Option

from specdec.lab.cli.options import DraftTokens, TreeSize, count, refuse, use_few_threads

Names = Literal["lookup", "zoo:model", "zoo:eagle3", "zoo:mask-token", "zoo:mtp"]


def demo(
    *,
    prompts: Annotated[int, count("number of prompts")] = 3,
    max_new_tokens: Annotated[int, Option(help="of each prompt")] = 96,
    num_draft_tokens: DraftTokens = None,
    tree: TreeSize = None,
    drafter: Annotated[Names, Option(help="whose text is shown; all are compared")] = "zoo:eagle3",
) -> int:
    """Complete prompts plainly and speculatively, and compare.

    Exits 1 if the texts differ.
    """
    from specdec.lab import zoo
    from specdec.lab.evaluation import compare
    from specdec.lab.show.tokens import colour_key, coloured_text

    if tree is not None:
        refuse({"num_draft_tokens": num_draft_tokens}, "belongs to chains; leave out --tree")
    tokenizer, target = zoo.load_tokenizer(), zoo.load_target()
    use_few_threads(target)
    generators = _generators(target, 4 if num_draft_tokens is None else num_draft_tokens, tree)
    (shown,) = (generator for name, generator in generators.items() if name.startswith(drafter))
    size = f"{target.config.num_hidden_layers} layers, {target.num_parameters() / 1e6:.1f} M"
    print(f"target: {size} parameters;  greedy;  shown: {drafter}\n{colour_key(sys.stdout)}")
    texts = zoo.heldout_prompts(prompts)
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        (steps,) = shown.generate(ids, max_new_tokens=max_new_tokens, do_sample=False).steps
        print("\n" + "-" * 80)
        print(coloured_text(tokenizer, text, steps, sys.stdout))
    print("\n" + "-" * 80)
    found = compare(generators, texts, tokenizer=tokenizer, max_new_tokens=max_new_tokens, rounds=3)
    written = [[row.new_tokens for row in run.rows] for run in found.runs]
    is_equal = all(each == written[0] for each in written)
    print("outputs of all ways of decoding are " + ("identical" if is_equal else "DIFFERENT"))
    print(f"\n{found}")
    return 0 if is_equal else 1


def _generators(target, k: int, size: list[int] | None) -> dict:
    """Of every drafter by its name and what it drafts, chains where it has no such trees."""
    from specdec import SpeculativeGenerator, Tree
    from specdec.lab.show.text import draft_size
    from specdec.loading import load_drafter

    tree = size and Tree(*size)
    whole = tree and replace(tree, nodes=tree.nodes // tree.depth * tree.depth)
    shapes = {"lookup": whole, "zoo:model": tree, "zoo:eagle3": tree, "zoo:mask-token": tree}
    generators = {"plain decoding": SpeculativeGenerator(target, None)}
    for name, shape in {**shapes, "zoo:mtp": None}.items():
        drafter = load_drafter(name, target, None if shape else k, tree=shape)
        drafts = draft_size(drafter.num_draft_tokens, drafter.tree_depth)
        generators[f"{name}, {drafts}"] = SpeculativeGenerator(target, drafter)
    return generators
