"""A step of a target that is spread over the GPUs of one host, eager and captured: the table of
docs/gpu.md.

    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/gpu_parallel.py   # into $OUT if it is set

Every process measures, and the first one prints: medians over rounds in which the sides take turns,
of 8B random weights that HF's tensor parallelism spreads. Without a GPU shapes are small, and the
figures say only that the program runs.
"""

import os
import tempfile
from pathlib import Path

import torch
from gpu import ROUNDS, Steps
from models import eagle3, prompt, shape
from timing import DEVICE, Turns, about
from torch import distributed
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from specdec import Target
from specdec.lab.show.table import Table

HEADER = ["ms per step", "steps run eagerly", "captured"]


def spread(folder: str) -> PreTrainedModel:
    """The 8B shape over all processes. The first one makes the whole model, and saves it."""
    if distributed.get_rank() == 0:
        shape("8B").save_pretrained(folder)
    distributed.barrier()
    plan = DistributedConfig(tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, distributed_config=plan
    ).eval()


def page(folder: str) -> str:
    """The table in Markdown."""
    model = spread(folder)
    ids, target = prompt(model, 512), Target(model)
    drafters = {"plain decoding": None, "EAGLE-3, K = 3": eagle3(model)}
    sides = {
        (name, is_captured): Steps(target, drafter, ids, graphs=is_captured)
        for name, drafter in drafters.items()
        for is_captured in ((False, True) if DEVICE == "cuda" else (False,))
    }
    times = Turns().run(sides, ROUNDS)
    rows = [
        [name, *(f"{times.ms((name, way)):.2f}" for way in (False, True) if (name, way) in times)]
        for name in drafters
    ]
    rows = [[*row, *[""] * (len(HEADER) - len(row))] for row in rows]
    where = f"{distributed.get_world_size()} x {about()}"
    what = "8B Llama shape" if DEVICE == "cuda" else "a small shape in place of 8B"
    what += f", random weights, bfloat16, one row, a prompt of {ids.shape[1]} tokens, not fused"
    return "\n\n".join([where, what, Table(HEADER, rows).markdown()])


def main() -> None:
    """As on the command line, in each process."""
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    folder = [tempfile.mkdtemp()]
    distributed.broadcast_object_list(folder)
    text = page(folder[0])
    if distributed.get_rank() == 0:
        print(text)
        if "OUT" in os.environ:
            Path(os.environ["OUT"], "gpu_parallel.md").write_text(text + "\n", encoding="utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
