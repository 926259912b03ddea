"""What `specdec train --dry-run` prints: the memory of a step, by the shape of its rows."""

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
    move_parameters(objective, args.device)
    objective.train()
    lr = args.learning_rate
    rates = {"lr_others": args.lr_ratio * lr, "weight_decay": args.weight_decay}
    optimizer = MuonAdamW(objective, lr=lr, **rates)
    tables = {id(t): t for t in (target.get_input_embeddings(), target.get_output_embeddings())}
    whole_tables = sum(w.nbytes for table in tables.values() for w in table.parameters())
    cells = []
    for end, length in args.row_lengths:
        rows = max(1, args.batch_shape(end - 1e-9)[0] // args.world_size)
        ids = torch.zeros((rows, length + 1), dtype=torch.long, device=args.device)
        way = partial(torch.autocast, args.device.type, torch.bfloat16, enabled=args.bf16)
        batches = args.gradient_accumulation_steps
        found = step_memory(objective, target, optimizer, ids, batches=batches, autocast=way)
        sizes = _of_process(found, args.world_size, whole_tables if is_spread else found.target)
        cells.append([f"{rows} x {length}", *(f"{size / 1e9:.3g}" for size in sizes)])
    notes = ["GB in each process; at most: with gradients and all that a step holds."]
    if len(cells) > 1:
        notes.append("Rows grow longer over the run (--length), and the last ones must fit.")
    if args.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(args.device)
        notes.append(f"{args.device} has {total / 1e9:.0f} GB, {free / 1e9:.0f} of them free.")
    header = ["rows x tokens", "target", "head", "optimiser", "at most"]
    return Table(header, cells, tuple(notes))


def _of_process(found: StepMemory, count: int, whole: int) -> tuple[int, int, int, int]:
    """Target, head, optimiser and all at most, where `whole` bytes of the target are in each of
    several processes, and the rest is spread over them.
    """
    away = int((found.target - whole) * (1 - 1 / count))
    copies = found.head if count > 1 else 0  # in which processes exchange gradients
    return found.target - away, found.head, found.optimizer, found.most - away + copies
