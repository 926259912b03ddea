"""Run by `test_captured_parallel.py`, one process per rank: captured steps of a target under tensor
parallelism, against eager ones and against the target on one device; then the process ends.

    RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 python tests/parallel/captured_processes.py FOLDER gloo destroy

The last argument is how the process ends, with generators and an unfinished generation alive:
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
from drafting import ragged_prompts
from two_processes import spread_over_processes

from specdec import PromptLookupDrafter, SpeculativeGenerator, Target
from specdec.drafters import EagleDrafter
from specdec.graphs import Captured

K = 3
RANK = int(os.environ.get("RANK", 0))  # doctests of all modules are collected by import
STARTED_S = time.perf_counter()


def say(text: str) -> None:
    """A line of the log, which shows of a run that hangs how far each rank came."""
    print(f"[rank {RANK}, {time.perf_counter() - STARTED_S:.1f} s] {text}", flush=True)


def live_graphs() -> list[Captured]:
    """What was captured, replayed, and not released."""
    found = [thing for thing in gc.get_objects() if type(thing) is Captured]
    return [each for each in found if each.num_calls and not each._is_released]


def device_of(backend: str) -> torch.device:
    """The device of this rank, with exact float32."""
    if backend == "gloo":
        return torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.set_device(RANK)
    return torch.device("cuda", RANK)


def texts(generator: SpeculativeGenerator, prompts: list) -> list:
    """New tokens and accepted counts, greedy and sampled."""
    found = []
    for options in ({"do_sample": False}, {"do_sample": True, "seed": [1, 2, 3]}):
        result = generator.generate(*prompts, max_new_tokens=24, **options)
        found.append((result.new_tokens.tolist(), result.stats.accepted))
    return found


def compare(folder: str, backend: str, meeting: str) -> tuple[dict, list]:
    """What the ranks report, and generators and generations whose graphs are alive."""
    device = device_of(backend)
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompts = [each.to(device) for each in ragged_prompts(whole.config.vocab_size, 3, 7, 5)]
    head = eagle_heads.informed(whole, eagle_heads.head_for(whole)).to(device)
    whole = whole.to(device)
    distributed.init_process_group(
        backend,
        init_method=f"file://{folder}/{meeting}",
        rank=RANK,
        world_size=int(os.environ["WORLD_SIZE"]),
        device_id=device if backend == "nccl" else None,
    )
    models = {"spread": spread_over_processes(folder), "whole": whole}
    targets = {name: Target(model) for name, model in models.items()}
    say("the target is spread")
    drafters = {
        "lookup": lambda model: PromptLookupDrafter(K),
        "eagle3": lambda model: EagleDrafter(head, model, K),
    }
    report, kept = {"texts": {}, "explain": [], "backend": distributed.get_backend()}, []
    for name, make in drafters.items():
        generators = {
            how: SpeculativeGenerator(targets[where], make(models[where]), graphs=graphs)
            for how, where, graphs in (
                ("captured", "spread", True),
                ("eager", "spread", False),
                ("whole", "whole", False),
            )
        }
        report["texts"][name] = {how: texts(g, prompts) for how, g in generators.items()}
        captured = generators["captured"]
        drawn = captured.generate(*prompts, max_new_tokens=24, do_sample=True)  # seeds at random
        report["texts"][name]["drawn"] = drawn.seeds, drawn.new_tokens.tolist()
        report["explain"].append(captured.explain())
        generation = captured.start(*prompts, max_new_tokens=24)
        for _ in range(5):
            captured.step(generation)
        kept.append((captured, generation))
        say(f"{name}: {len(live_graphs())} graphs are alive")
    return report, kept


def main() -> None:
    """Compares, writes a report, and ends."""
    folder, backend, ending = sys.argv[1:]
    report, kept = compare(folder, backend, meeting=ending)
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
