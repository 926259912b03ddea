"""Captured steps on a GPU equal eager ones, with the installed transformers and torch: the zoo with
every drafter and sampler, the shapes of an 8B model, of a hybrid one, of mixtures of experts and of
indexed attention in bfloat16, heads with every correction, and a forward that was replaced.

    PYTHONPATH=. python benchmarks/gpu_check.py            # --only zoo, --only hybrid, ...

Each line compares every replayed step with the same step run eagerly (`check=True`: tokens,
acceptance by position, lengths), over rows of several lengths, greedy and sampled. Acceptance of
chains over random weights is synthetic. Without a GPU shapes are small, and nothing is captured.
"""

import argparse
import gc
import sys
from collections.abc import Callable
from functools import lru_cache, partial

import models
import torch
from timing import DEVICE, about, timed
from torch.nn.utils.rnn import pad_sequence

from specdec import PromptLookupDrafter, SpeculativeGenerator, Target, zoo
from specdec.drafters.mask_token.correction import (
    DominoConfig,
    MarkovConfig,
    SelectorConfig,
    XPressConfig,
)
from specdec.drafters.mask_token.lattice import LiLiCorrConfig
from specdec.drafters.tree import Tree

LENGTHS = (37, 5, 130)
NUM_NEW = 64 if DEVICE == "cuda" else 12
GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": [0.7, 0.0, 1.1], "top_p": 0.95, "seed": [1, 2, 3]}
CORRECTIONS = {
    "Markov": MarkovConfig(16),
    "gated": MarkovConfig(16, "gated"),
    "rnn": MarkovConfig(16, "rnn"),
    "Domino": DominoConfig(16, 64),
    "selector": SelectorConfig(16),
    "XPress": XPressConfig(16),
    "LiLiCorr": LiLiCorrConfig(8, 16),
}
BIG = {"30B-A3B": {}, "V3.2, five layers": {"index_topk": 64}}
"""Mixtures of experts of 57 and 61 GB; few chosen keys, so that not all of a text are."""
shape = lru_cache(maxsize=1)(models.shape)


def of_zoo(kind: str, sampler: str = "auto") -> SpeculativeGenerator:
    """A drafter of the package over its target."""
    target = zoo.load_target().to(DEVICE)
    drafter = None if kind == "none" else PromptLookupDrafter(4)
    if kind not in ("none", "lookup"):
        drafter = zoo.load_drafter(kind, target)
    return SpeculativeGenerator(target, drafter, sampler, graphs=True)


def of_shape(name: str, draft: Callable, fuse: bool = False) -> SpeculativeGenerator:
    """Random weights of a real shape."""
    if name in BIG:
        shape.cache_clear()  # they leave little room
    model = shape(name, **BIG.get(name, {}))
    if DEVICE == "cpu" and name in BIG:
        model.set_experts_implementation("batched_mm")
    drafter = draft(model)
    sampler = models.DialledSampler(0.8) if drafter.tree_depth is None else "auto"
    return SpeculativeGenerator(Target(model, fuse=fuse), drafter, sampler, graphs=True)


def of_replaced_forward() -> SpeculativeGenerator:
    """A generator that was used, and whose target is then called through another function."""
    generator = of_zoo("eagle3")
    model, ids = generator.target.model, torch.tensor([[7, 8, 9]], device=DEVICE)
    generator.generate(ids, max_new_tokens=8)
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    return generator


def cases() -> dict[str, Callable[[], SpeculativeGenerator]]:
    """What is checked; cases of one shape follow each other and share the model."""
    kinds = ("none", "lookup", "model", "eagle3", "mask-token", "mtp")
    rules = ("rejection", "coupling", "typical")
    heads = {
        "EAGLE-3": models.eagle3,
        "EAGLE-3 tree": partial(models.eagle3, tree=Tree(15, 4, 4)),
        "mask-token": partial(models.mask_token, num_draft_tokens=4),
        "MTP": models.mtp,
    } | {
        f"block, {name}": partial(models.block_head, correction=c)
        for name, c in CORRECTIONS.items()
    }
    lookup = {"lookup": lambda model: PromptLookupDrafter(4)}
    hybrid = lookup | {"EAGLE-3": models.eagle3}
    return (
        {f"zoo, {kind}": partial(of_zoo, kind) for kind in kinds}
        | {f"zoo, eagle3, {rule}": partial(of_zoo, "eagle3", rule) for rule in rules}
        | {"zoo, eagle3, forward replaced between calls": of_replaced_forward}
        | {f"8B, {name}": partial(of_shape, "8B", head) for name, head in heads.items()}
        | {"8B fused, mask-token": partial(of_shape, "8B", heads["mask-token"], fuse=True)}
        | {f"9B hybrid, {name}": partial(of_shape, "9B hybrid", d) for name, d in hybrid.items()}
        | {f"{name}, lookup": partial(of_shape, name, lookup["lookup"]) for name in BIG}
    )


def check(make: Callable[[], SpeculativeGenerator]) -> str:
    """What happened to one greedy and one sampled call."""
    generator = make()
    target = generator.target
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, target.vocab_size, (n,), generator=draw) for n in LENGTHS]
    ids = pad_sequence(rows, batch_first=True, padding_side="left").to(target.device)
    lengths = torch.tensor(LENGTHS, device=target.device)[:, None]
    mask = torch.arange(ids.shape[1], 0, -1, device=target.device) <= lengths
    said = []
    for options in (GREEDY, SAMPLED):
        options = {**options, "max_new_tokens": NUM_NEW, "eos_token_id": [], "neutral": True}
        found = generator.generate(ids, mask.long(), check=True, **options)
        steps = max(len(row) for row in found.steps)
        said.append(f"{steps} steps, acceptance length {found.stats.acceptance_length:.2f}")
    return "; ".join(said)


def main() -> int:
    """As on the command line; 1 where a line fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name has these words")
    only, num_failed = parser.parse_args().only, 0
    chosen = {name: make for name, make in cases().items() if only in name}
    print(about())
    for name, make in chosen.items():
        try:
            ms, said = timed(partial(check, make))
            said = f"captured = eager: {said} ({ms / 1e3:.0f} s)"
        except Exception as error:
            said, num_failed = f"FAILED {type(error).__name__}: {str(error)[:300]}", num_failed + 1
        print(f"{name}: {said}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    print(f"{len(chosen) - num_failed} passed, {num_failed} failed")
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
