"""Captured steps on a GPU equal eager ones, with the installed transformers and torch: the zoo with
every drafter, the shapes of an 8B model and of a hybrid one in bfloat16, and a forward that was
replaced.

    python benchmarks/gpu_check.py            # add --tiny to try the script itself

Each line compares every replayed step with the same step run eagerly (`check=True`: tokens,
acceptance by position, lengths), over rows of several lengths. Acceptance of chains over random
weights is synthetic.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import gpu_parts
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from specdec import EagleDrafter, PromptLookupDrafter, SpeculativeGenerator, Target, zoo
from specdec.drafters.tree import Tree

LENGTHS = (37, 5, 130)
GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": [0.7, 0.0, 1.1], "top_p": 0.95, "seed": [1, 2, 3]}


def of_zoo(kind: str, device: str) -> SpeculativeGenerator:
    """A drafter of the package over its target."""
    target = zoo.load_target().to(device)
    return SpeculativeGenerator(target, zoo.load_drafter(kind, target), graphs=True)


def of_shape(make: Callable, draft: Callable, fuse: bool, sizes: dict) -> SpeculativeGenerator:
    """Random weights of a real shape."""
    model = make(**sizes)
    drafter, sampler = draft(model), gpu_parts.DialledSampler(0.8)
    if drafter.tree_depth is not None:
        sampler = "auto"
    return SpeculativeGenerator(Target(model, fuse=fuse), drafter, sampler, graphs=True)


def tree(model: torch.nn.Module) -> EagleDrafter:
    """The EAGLE-3 head drafts trees."""
    return EagleDrafter(gpu_parts.eagle3(model).head, model, tree=Tree(15, 4, 4))


def lookup(model: torch.nn.Module) -> PromptLookupDrafter:
    """Without weights."""
    return PromptLookupDrafter(4)


def of_replaced_forward(device: str) -> SpeculativeGenerator:
    """A generator that was used, and whose target is then called through another function."""
    generator = of_zoo("eagle3", device)
    model, ids = generator.target.model, torch.tensor([[7, 8, 9]], device=device)
    generator.generate(ids, max_new_tokens=8)
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    return generator


def check(make: Callable[[], SpeculativeGenerator], num_new: int) -> str:
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
        options = {**options, "max_new_tokens": num_new, "eos_token_id": [], "neutral": True}
        found = generator.generate(ids, mask.long(), check=True, **options)
        steps = max(len(row) for row in found.steps)
        said.append(f"{steps} steps, acceptance length {found.stats.acceptance_length:.2f}")
    return "; ".join(said)


def main() -> int:
    """As on the command line; 1 where a line fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small shapes, on any device")
    parser.add_argument("--only", default="", help="cases whose name has these words")
    tiny, only = vars(parser.parse_args()).values()
    device, sizes = gpu_parts.DEVICE, gpu_parts.TINY if tiny else {}
    hybrid = sizes | ({"linear_key_head_dim": 16, "linear_value_head_dim": 16} if tiny else {})
    big, mixed = gpu_parts.shape_8b, gpu_parts.shape_9b_hybrid
    parallel = partial(gpu_parts.mask_token, num_draft_tokens=4)
    kinds = ("model", "eagle3", "mask-token", "mtp")
    cases = {f"zoo, {kind}": partial(of_zoo, kind, device) for kind in kinds} | {
        "zoo, eagle3, forward replaced between calls": partial(of_replaced_forward, device),
        "8B, EAGLE-3": partial(of_shape, big, gpu_parts.eagle3, False, sizes),
        "8B, EAGLE-3 tree": partial(of_shape, big, tree, False, sizes),
        "8B fused, mask-token": partial(of_shape, big, parallel, True, sizes),
        "9B hybrid, lookup": partial(of_shape, mixed, lookup, True, hybrid),
        "9B hybrid, EAGLE-3": partial(of_shape, mixed, gpu_parts.eagle3, False, hybrid),
    }
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {name}")
    num_failed = 0
    cases = {case: make for case, make in cases.items() if only in case}
    for case, make in cases.items():
        started = time.perf_counter()
        try:
            said = f"captured = eager: {check(make, 24 if tiny else 64)}"
        except Exception as error:
            said, num_failed = f"FAILED {type(error).__name__}: {str(error)[:300]}", num_failed + 1
        print(f"{case}: {said} ({time.perf_counter() - started:.0f} s)", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
    print(f"{len(cases) - num_failed} passed, {num_failed} failed")
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
