"""What `specdec train --dry-run` prints: the memory of a step, by the shape of its rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.hf.layers import decoder_layers
from specdec.lab.show.table import Table
from specdec.lab.training.memory import StepMemory, move_parameters, step_memory
from specdec.lab.training.optimizer import MuonAdamW
from specdec.lab.training.trainer import ObjectiveArguments


def memory_table(
    args: ObjectiveArguments,
    target: PreTrainedModel,
    objective: nn.Module,
    *,
    is_spread: bool = False,
    is_sharded: bool = False,
) -> Table:
    """Of every length of rows of a run, in one process.

    Args:
        args: of the run.
        target: of fake tensors, as the objective.
        objective: that is trained.
        is_spread: the target's layers are spread over the processes by tensor parallelism.
        is_sharded: they are sharded by FSDP2.
    """
    ways = {"is_spread": is_spread, "is_sharded": is_sharded}
    cells = []
    for (rows, length), found in process_memory(args, target, objective, **ways):
        sizes = (found.target, found.head, found.optimizer, found.most)
        cells.append([f"{rows} x {length}", *(f"{size / 1e9:.3g}" for size in sizes)])
    notes = ["GB in each process; at most: with gradients and all that a step holds."]
    if len(cells) > 1:
        notes.append("Rows grow longer over the run (--length), and the last ones must fit.")
    if args.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(args.device)
        notes.append(f"{args.device} has {total / 1e9:.0f} GB, {free / 1e9:.0f} of them free.")
    header = ["rows x tokens", "target", "head", "optimiser", "at most"]
    return Table(header, cells, tuple(notes))


def process_memory(
    args: ObjectiveArguments,
    target: PreTrainedModel,
    objective: nn.Module,
    *,
    is_spread: bool = False,
    is_sharded: bool = False,
) -> list[tuple[tuple[int, int], StepMemory]]:
    """What a step takes in one process: (rows, tokens) of its batches, and bytes, for every length
    of rows of a run.

    Args:
        args, target, objective, is_spread, is_sharded: as for `memory_table`.
    """
    move_parameters(objective, args.device)
    objective.train()
    lr = args.learning_rate
    rates = {"lr_others": args.lr_ratio * lr, "weight_decay": args.weight_decay}
    optimizer = MuonAdamW(objective, lr=lr, **rates)
    layers = [*decoder_layers(target)[1]]
    tables = {id(t): t for t in (target.get_input_embeddings(), target.get_output_embeddings())}
    shapes = []
    for end, length in args.row_lengths:
        rows = max(1, args.batch_shape(end - 1e-9)[0] // args.world_size)
        ids = torch.zeros((rows, length + 1), dtype=torch.long, device=args.device)
        way = partial(torch.autocast, args.device.type, torch.bfloat16, enabled=args.bf16)
        options = {"batches": args.gradient_accumulation_steps, "autocast": way}
        with _gathering(layers if is_sharded else ()):
            found = step_memory(objective, target, optimizer, ids, **options)
        whole = found.target
        if is_spread:
            whole = sum(map(_num_bytes, tables.values()))
        elif is_sharded:
            whole -= sum(map(_num_bytes, layers))
        found = _of_process(found, args.world_size, whole, is_sharded=is_sharded)
        shapes.append(((rows, length), found))
    return shapes


def _num_bytes(module: nn.Module) -> int:
    """Of its weights."""
    return sum(weight.nbytes for weight in module.parameters())


@contextmanager
def _gathering(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Layers that compute as FSDP2 has them do it: each as a whole beside the buffer into which it
    was gathered, and that buffer stays until the next layer is gathered.
    """
    held: list[Tensor] = []

    def hold(copies: int, layer: nn.Module, *_: Any) -> None:
        size, device = _num_bytes(layer), next(layer.parameters()).device
        held.clear()
        held.extend(torch.empty(size, dtype=torch.uint8, device=device) for _ in range(copies))

    handles = [layer.register_forward_pre_hook(partial(hold, 2)) for layer in layers]
    handles += [layer.register_forward_hook(partial(hold, 1)) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _of_process(
    found: StepMemory, count: int, whole: int, *, is_sharded: bool = False
) -> StepMemory:
    """What a step takes where `whole` bytes of the target are in each of several processes, and the
    rest is spread over them; under FSDP2 a part of the former is there once more.
    """
    away = int((found.target - whole) * (1 - 1 / count)) - (whole // count) * is_sharded
    copies = found.head if count > 1 else 0  # in which processes exchange gradients
    return replace(found, target=found.target - away, most=found.most - away + copies)
