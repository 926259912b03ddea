"""Run by `test_parallel_targets.py` in two gloo processes: every drafter on a target whose weights
are spread over both, against the same target on one.

    python -m torch.distributed.run --nproc_per_node 2 tests/parallel/two_processes.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

import eagle_heads
import mask_heads
import mtp_heads
from drafting import perturbed, ragged_prompts

from specdec import (
    BlockSampler,
    CouplingSampler,
    ModelDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
)
from specdec.drafters import EagleDrafter, MaskTokenDrafter, MTPDrafter

K = 3


def drafters(target, whole) -> dict:
    """Of every kind; the draft model and the heads are whole in every process, but for what they
    borrow from the target.
    """
    masks = mask_heads.informed(whole, mask_heads.head_for(whole, "p-eagle"), K)
    return {
        "none": None,
        "lookup": PromptLookupDrafter(K),
        "model": ModelDrafter(perturbed(whole), K),
        "eagle3": EagleDrafter(eagle_heads.informed(whole, eagle_heads.head_for(whole)), target, K),
        "mask-token": MaskTokenDrafter(masks, target, K, proposal="sample"),
        "mtp": MTPDrafter(mtp_heads.informed(whole, num_depths=K), target, K),
    }


def texts(target, whole) -> dict:
    """New tokens and acceptance of every drafter, greedy and sampled."""
    ids, mask = ragged_prompts(whole.config.vocab_size, 3, 7, 5)
    found = {}
    for name, drafter in drafters(target, whole).items():
        for sampler in (BlockSampler(), RejectionSampler(), CouplingSampler()):
            generator = SpeculativeGenerator(target, drafter, sampler)
            for options in ({"do_sample": False}, {"do_sample": True, "seed": [1, 2, 3]}):
                result = generator.generate(ids, mask, max_new_tokens=12, **options)
                key = f"{name}, {type(sampler).__name__}, {options['do_sample']}"
                found[key] = result.new_tokens.tolist(), result.stats.accepted
    return found


def spread_over_processes(folder: str):
    """The model with its tensor-parallel plan; transformers renamed the argument."""
    try:
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(tp_plan="auto")
        return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).eval()
    except (ImportError, TypeError):
        return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()


def main() -> None:
    """Compares, and writes a report per process."""
    folder = sys.argv[1]
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    alone = texts(whole, whole)
    torch.distributed.init_process_group("gloo")
    spread = spread_over_processes(folder)
    together = texts(spread, whole)
    rank = torch.distributed.get_rank()
    own = sum(
        p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in spread.parameters()
    )
    report = {
        "equal": alone == together,
        "different": [key for key in alone if alone[key] != together[key]],
        "cases": len(alone),
        "own_parameters": own,
        "whole_parameters": sum(p.numel() for p in whole.parameters()),
        "accepted": {key: sum(accepted) for key, (_, accepted) in alone.items()},
    }
    Path(folder, f"report_{rank}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
