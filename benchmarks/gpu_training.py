"""Training an EAGLE-3 head for a target that is spread over the GPUs of one host: tokens per
second, and memory beside the estimate of `training_memory.py` for `--spread-target`; with `--fsdp`,
for layers that FSDP2 shards (`--shard-target`).

    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/gpu_training.py --shape 30B-A3B

Weights are random and drawn where they lie: no process makes or writes the whole target. The first
process prints, and writes into $OUT if it is set. Without a GPU shapes are small, and the figures
say only that the program runs.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from models import config_of
from timing import DEVICE, about, synchronize
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from training_memory import StepMemory, process_memory
from transformers import AutoModelForCausalLM, PreTrainedModel, PrinterCallback, TrainerCallback
from transformers.distributed import DistributedConfig

from specdec.drafters import EagleDrafter
from specdec.hf.prompts import auto_class
from specdec.lab.show.table import Table
from specdec.lab.training import (
    ObjectiveArguments,
    ObjectiveTrainer,
    PackedStream,
    TrainingTimeTest,
    new_head,
)
from specdec.lab.training.target_parts import keep_tables_whole, spread_plan

STEPS, WARM_UP = 12, 3
TOKENS, LENGTH, IDS = (16_384, 2048, 32_000) if DEVICE == "cuda" else (256, 32, 100)
HEADER = ["GB per process", "measured", "estimated", "estimated / measured"]


def spread(config, *, is_sharded: bool) -> PreTrainedModel:
    """The part of a random model that is this process's. HF loads zeros that take no memory."""
    count = distributed.get_world_size()
    plan = {"tp_size": count, "tp_plan": spread_plan(config)}
    kind = getattr(transformers, auto_class(config))
    with torch.device("meta"):
        empty = kind.from_config(config, dtype=torch.bfloat16)
    zero = torch.zeros((), dtype=torch.bfloat16, device="cpu")
    model = type(empty).from_pretrained(
        None,
        config=config,
        state_dict={name: zero.expand(each.shape) for name, each in empty.state_dict().items()},
        dtype=torch.bfloat16,
        distributed_config=DistributedConfig(**{"fsdp_size": count} if is_sharded else plan),
    )
    torch.manual_seed(0)  # what is whole is the same in all processes
    for weight in model.parameters():
        if not isinstance(weight, DTensor) and 0 in weight.stride():
            weight.data = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        own = weight.to_local() if isinstance(weight, DTensor) else weight
        with torch.no_grad():
            own.fill_(1.0) if own.dim() == 1 else own.normal_(std=0.02)
    if is_sharded:
        keep_tables_whole(model.requires_grad_(False))
    return model.eval()


def arguments(options: argparse.Namespace, folder: str) -> ObjectiveArguments:
    """Of the run."""
    return ObjectiveArguments(
        folder,
        max_steps=STEPS,
        tokens_per_step=options.tokens_per_step,
        row_lengths=((1.0, options.length),),
        bf16=DEVICE == "cuda",
        use_cpu=DEVICE == "cpu",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )


def objective_of(target: PreTrainedModel, ids: Tensor) -> TrainingTimeTest:
    """Of a new EAGLE-3 head that proposes these ids."""
    return TrainingTimeTest(
        EagleDrafter(new_head(target, "eagle3", target_ids=ids), target), target
    )


def estimate(config, args: ObjectiveArguments, ids: Tensor, *, is_sharded: bool) -> StepMemory:
    """What `training_memory.py` says of the same arguments."""
    ways = {"is_sharded": is_sharded, "is_spread": not is_sharded}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(args.device):
        target = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        ((_, found),) = process_memory(args, target, objective_of(target, ids), **ways)
    return found


class Watch(TrainerCallback):
    """The time of all steps but the first ones."""

    def on_step_begin(self, args, state, control, **kwargs):
        """Starts the watch."""
        if state.global_step == WARM_UP:
            synchronize()
            self.started_s = time.perf_counter()

    def on_train_end(self, args, state, control, **kwargs):
        """Stops it."""
        synchronize()
        self.taken_s = time.perf_counter() - self.started_s


def say(started_s: float, text: str) -> None:
    """How far the program is."""
    if int(os.environ["RANK"]) == 0:
        print(f"[{time.perf_counter() - started_s:.1f} s] {text}", flush=True)


def in_all(value) -> list:
    """The values of all processes."""
    found = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def page(options: argparse.Namespace, folder: str) -> str:
    """What was measured, in Markdown."""
    started_s = time.perf_counter()
    args = arguments(options, folder)
    config = config_of(options.shape)
    ids = torch.arange(IDS, device="cpu")
    say(started_s, f"{args.world_size} processes have met")
    estimated = estimate(config, args, ids, is_sharded=options.fsdp)
    say(started_s, f"estimated {estimated.most / 1e9:.1f} GB")
    target = spread(config, is_sharded=options.fsdp)
    held = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    say(started_s, f"the target is built, {held / 1e9:.1f} GB in each process")
    objective, watch = objective_of(target, ids), Watch()
    rows = np.random.default_rng(0).integers(config.vocab_size, size=(64, 4 * options.length))
    trainer = ObjectiveTrainer(objective, args, PackedStream([*rows], seed=0), [watch])
    trainer.remove_callback(PrinterCallback)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    state = trainer.train_or_resume()
    say(started_s, "trained")
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    losses = [log["loss"] for log in state.log_history if "loss" in log]
    digest = sum(weight.double().sum().item() for weight in objective.parameters())
    found = in_all((held, peak, losses, digest))
    speed = args.tokens_per_step * (STEPS - WARM_UP) / watch.taken_s
    ends = [(f"{own[0]:.4f}", f"{own[-1]:.4f}", f"{total:.9g}") for _, _, own, total in found]
    where = f"{len(found)} x {about()}"
    what = f"{options.shape} shape" if DEVICE == "cuda" else f"a small shape like {options.shape}"
    what += f" ({sum(w.numel() for w in target.parameters()) / 1e9:.3g} B parameters), random "
    way = "layers sharded by FSDP2" if options.fsdp else "tensor parallelism"
    what += f"weights, {way}; {STEPS} steps of {args.tokens_per_step} tokens in rows "
    what += f"of {options.length}"
    told = f"{speed:.0f} tokens/s; loss of the first and the last step, and the sum of the head's "
    told += f"weights, by process: {'; '.join(', '.join(each) for each in ends)}"
    sizes = [("target", estimated.target, max(each[0] for each in found))]
    sizes.append(("at most", estimated.most, max(each[1] for each in found)))
    cells = []
    for name, guess, measured in sizes:
        both = (f"{measured / 1e9:.2f}", f"{guess / measured:.3f}") if measured else ("-", "-")
        cells.append([name, both[0], f"{guess / 1e9:.2f}", both[1]])
    return "\n\n".join([where, what, told, Table(HEADER, cells).markdown()])


def main() -> None:
    """As on the command line, in each process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("8B", "30B-A3B"), default="30B-A3B")
    parser.add_argument("--fsdp", action="store_true", help="not tensor parallelism")
    parser.add_argument("--tokens-per-step", type=int, default=TOKENS)
    parser.add_argument("--length", type=int, default=LENGTH)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with tempfile.TemporaryDirectory() as folder:
        text = page(options, folder)
    if distributed.get_rank() == 0:
        print(text)
        if "OUT" in os.environ:
            name = "gpu_training_fsdp.md" if options.fsdp else "gpu_training.md"
            Path(os.environ["OUT"], name).write_text(text + "\n", encoding="utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
