"""What `specdec train --dry-run` prints: the memory of a step, by the shape of its rows."""

from dataclasses import replace
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.show.table import Table
from specdec.training.memory import StepMemory, move_parameters, step_memory
from specdec.training.optimizer import MuonAdamW
from specdec.training.trainer import ObjectiveArguments


def memory_table(
    args: ObjectiveArguments, target: PreTrainedModel, objective: nn.Module, *, is_spread: bool
) -> Table:
    """Of every length of rows of a run, in one process.

    Args:
        args: of the run.
        target: of fake tensors, as the objective.
        objective: that is trained.
        is_spread: the target's layers are spread over the processes.
    """
    cells = []
    for (rows, length), found in process_memory(args, target, objective, is_spread=is_spread):
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
    args: ObjectiveArguments, target: PreTrainedModel, objective: nn.Module, *, is_spread: bool
) -> list[tuple[tuple[int, int], StepMemory]]:
    """What a step takes in one process: (rows, tokens) of its batches, and bytes, for every length
    of rows of a run.

    Args:
        args, target, objective, is_spread: as for `memory_table`.
    """
    move_parameters(objective, args.device)
    objective.train()
    lr = args.learning_rate
    rates = {"lr_others": args.lr_ratio * lr, "weight_decay": args.weight_decay}
    optimizer = MuonAdamW(objective, lr=lr, **rates)
    tables = {id(t): t for t in (target.get_input_embeddings(), target.get_output_embeddings())}
    whole_tables = sum(w.nbytes for table in tables.values() for w in table.parameters())
    shapes = []
    for end, length in args.row_lengths:
        rows = max(1, args.batch_shape(end - 1e-9)[0] // args.world_size)
        ids = torch.zeros((rows, length + 1), dtype=torch.long, device=args.device)
        way = partial(torch.autocast, args.device.type, torch.bfloat16, enabled=args.bf16)
        batches = args.gradient_accumulation_steps
        found = step_memory(objective, target, optimizer, ids, batches=batches, autocast=way)
        whole = whole_tables if is_spread else found.target
        shapes.append(((rows, length), _of_process(found, args.world_size, whole)))
    return shapes


def _of_process(found: StepMemory, count: int, whole: int) -> StepMemory:
    """What a step takes where `whole` bytes of the target are in each of several processes, and the
    rest is spread over them.
    """
    away = int((found.target - whole) * (1 - 1 / count))
    copies = found.head if count > 1 else 0  # in which processes exchange gradients
    return replace(found, target=found.target - away, most=found.most - away + copies)
