"""Run by the tests of this folder, one process per rank: targets under tensor parallelism against
the same target on one device.

    RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 python tests/parallel/two_processes.py FOLDER gloo texts

The last argument is `texts`, for every drafter and sampler; or how a process ends that holds
generators and an unfinished generation, after captured steps were compared with eager ones:
`destroy` calls `destroy_process_group()`, `exit` only returns.
"""

import atexit
import gc
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

import eagle_heads
import mask_heads
import mtp_heads
from drafting import perturbed, ragged_prompts

from specdec import ModelDrafter, PromptLookupDrafter, SpeculativeGenerator, Target
from specdec.drafters import EagleDrafter, MaskTokenDrafter, MTPDrafter
from specdec.graphs import Captured
from specdec.loop import lengths

K = 3
RANK = int(os.environ.get("RANK", 0))  # doctests of all modules are collected by import
STARTED_S = time.perf_counter()
WAYS = {"do_sample": False}, {"do_sample": True, "seed": [1, 2, 3]}


def say(text: str) -> None:
    """A line of the log, which shows of a run that hangs how far each rank came."""
    print(f"[rank {RANK}, {time.perf_counter() - STARTED_S:.1f} s] {text}", flush=True)


def join(folder: str, backend: str, meeting: str) -> torch.device:
    """Starts the process group; returns the device of this rank, with exact float32."""
    device = torch.device("cpu")
    if backend == "nccl":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.cuda.set_device(RANK)
        device = torch.device("cuda", RANK)
    distributed.init_process_group(
        backend,
        init_method=f"file://{folder}/{meeting}",
        rank=RANK,
        world_size=int(os.environ["WORLD_SIZE"]),
        device_id=device if backend == "nccl" else None,
    )
    return device


def spread_over_processes(folder: str):
    """The model with its tensor-parallel plan; transformers renamed the argument."""
    try:
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(tp_plan="auto")
        return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).eval()
    except (ImportError, TypeError):
        return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()


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
    """New tokens and acceptance of every drafter and sampler, greedy and sampled."""
    ids, mask = ragged_prompts(whole.config.vocab_size, 3, 7, 5)
    found = {}
    for name, drafter in drafters(target, whole).items():
        for sampler in ("block", "rejection", "coupling"):
            generator = SpeculativeGenerator(target, drafter, sampler)
            for options in WAYS:
                result = generator.generate(ids, mask, max_new_tokens=12, **options)
                key = f"{name}, {sampler}, {options['do_sample']}"
                found[key] = result.new_tokens.tolist(), result.stats.accepted
    return found


def chosen_lengths(spread, whole) -> list:
    """Draft tokens of each step where costs choose them, in processes whose clocks disagree: the
    second has time for three rounds alone, and measures steps of other lengths as dear.
    """
    clock = time.perf_counter
    lengths.SECONDS = (0.3, 0.0)[RANK]
    lengths.time.perf_counter = lambda: clock() * (1 + 9 * RANK)
    generator = SpeculativeGenerator(spread, ModelDrafter(perturbed(whole), K), draft_length="auto")
    ids, mask = ragged_prompts(whole.config.vocab_size, 3, 7, 5)
    result = generator.generate(ids, mask, max_new_tokens=24, do_sample=True, seed=[1, 2, 3])
    return [[len(step.draft_tokens) for step in row] for row in result.steps]


def compare_texts(folder: str, backend: str) -> dict:
    """What a rank reports of all drafters and samplers."""
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    alone = texts(whole, whole)
    join(folder, backend, "texts")
    spread = spread_over_processes(folder)
    together = texts(spread, whole)
    chosen = chosen_lengths(spread, whole)
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in spread.parameters()]
    distributed.destroy_process_group()
    return {
        "different": [key for key in alone if alone[key] != together[key]],
        "cases": len(alone),
        "own_parameters": sum(part.numel() for part in parts),
        "whole_parameters": sum(p.numel() for p in whole.parameters()),
        "chosen_lengths": chosen,
        "accepted": {key: sum(accepted) for key, (_, accepted) in alone.items()},
    }


def live_graphs() -> list[Captured]:
    """What was captured, replayed, and not released."""
    found = [thing for thing in gc.get_objects() if type(thing) is Captured]
    return [each for each in found if each.num_calls and not each._is_released]


def compare_captured(folder: str, backend: str, meeting: str) -> tuple[dict, list]:
    """What the ranks report, and generators and generations whose graphs are alive."""
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    head = eagle_heads.informed(whole, eagle_heads.head_for(whole))
    device = join(folder, backend, meeting)
    prompts = [each.to(device) for each in ragged_prompts(whole.config.vocab_size, 3, 7, 5)]
    head, whole = head.to(device), whole.to(device)
    models = {"spread": spread_over_processes(folder), "whole": whole}
    targets = {name: Target(model) for name, model in models.items()}
    say("the target is spread")
    makes = {
        "lookup": lambda model: PromptLookupDrafter(K),
        "eagle3": lambda model: EagleDrafter(head, model, K),
    }
    report, kept = {"texts": {}, "explain": [], "backend": distributed.get_backend()}, []
    for name, make in makes.items():
        found = report["texts"][name] = {}
        for how, where in (("eager", "spread"), ("whole", "whole"), ("captured", "spread")):
            graphs = how == "captured"
            generator = SpeculativeGenerator(targets[where], make(models[where]), graphs=graphs)
            results = [generator.generate(*prompts, max_new_tokens=24, **way) for way in WAYS]
            found[how] = [(r.new_tokens.tolist(), r.stats.accepted) for r in results]
        drawn = generator.generate(*prompts, max_new_tokens=24, do_sample=True)  # seeds at random
        found["drawn"] = drawn.seeds, drawn.new_tokens.tolist()
        report["explain"].append(generator.explain())
        generation = generator.start(*prompts, max_new_tokens=24)
        for _ in range(5):
            generator.step(generation)
        kept.append((generator, generation))
        say(f"{name}: {len(live_graphs())} graphs are alive")
    return report, kept


def main() -> None:
    """Compares, writes a report, and ends."""
    folder, backend, ending = sys.argv[1:]
    if ending == "texts":
        report, kept = compare_texts(folder, backend), []
    else:
        report, kept = compare_captured(folder, backend, meeting=ending)
        report["num_live"] = len(live_graphs())
    if ending == "destroy":
        say("destroy_process_group() begins")
        distributed.destroy_process_group()
        report["num_left"] = len(live_graphs())
        say(f"it has ended; {report['num_left']} graphs are alive")
    Path(folder, f"{ending}_{RANK}.json").write_text(json.dumps(report))
    say(f"the script ends, holding {len(kept)} generators")


if __name__ == "__main__":
    # What is registered first runs last: after the functions of specdec, which come with a capture.
    atexit.register(lambda: say(f"{len(live_graphs())} graphs are alive at the very end"))
    main()
