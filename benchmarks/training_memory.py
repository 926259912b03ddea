"""What a step of `specdec train` takes, from running it on tensors without data, with the options
of that command:

    PYTHONPATH=. python benchmarks/training_memory.py eagle3 --target PATH_OR_ID \
        --data texts.jsonl --output my-head --draft-vocab-size 32000

Torch's fake tensors have shapes, types and devices, and their operations run no arithmetic. So the
step that will be trained is the estimate: no formula of ours stands between them. No weights are
loaded or made, and nothing is written.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
import typer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from specdec.graphs.tree import leaves
from specdec.hf.layers import decoder_layers
from specdec.hf.prompts import auto_class
from specdec.lab.cli.options import ungrouped
from specdec.lab.cli.training_options import Run
from specdec.lab.cli.training_run import any_ids, arguments_of, objective_of, row_lengths_of
from specdec.lab.show.table import Table
from specdec.lab.training.optimizer import MuonAdamW
from specdec.lab.training.trainer import ObjectiveArguments
from specdec.loading import find_pretrained, load_pretrained, place_of
from specdec.torch_names import buffers_of, parameters_of


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations return while it is active, as long as they
    live; several views of one storage count once.

    Attributes:
        now: bytes that live.
        most: the largest number that lived at a time.

    Example:
        >>> with LiveBytes() as live:
        ...     x = torch.ones(1024, device="cpu")  # 4096 bytes
        ...     y = (x + 1).sum()
        >>> live.most >= 8192 > live.now
        True
    """

    def __init__(self):
        super().__init__()
        self.now, self.most = 0, 0
        self._sizes: dict[int, int] = {}

    def take_in(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that were there before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = id(storage)
            if key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.now += self._sizes[key]
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._leave, key)

    def _leave(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation, and counts what it returns."""
        found = func(*args, **(kwargs or {}))
        self.take_in(each for _, each in leaves(found) if isinstance(each, Tensor))
        return found


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a training step in one process.

    Args:
        target: its weights.
        head: weights that are trained.
        optimizer: what the optimiser keeps between steps.
        most: all that lives at once, at most: these three, gradients, and what forward and backward
            pass hold.
    """

    target: int
    head: int
    optimizer: int
    most: int


def step_memory(
    objective: nn.Module,
    target: nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: Tensor,
    *,
    batches: int = 1,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> StepMemory:
    """What the second step of a training takes, when the optimiser has its state.

    Args:
        objective: that is trained; of fake tensors (`FakeTensorMode`, active
            while it is called) nothing is computed.
        target: its teacher.
        optimizer: of its parameters.
        ids: `[B, T + 1]` of a batch.
        batches: that are accumulated.
        autocast: makes the context of each forward.

    Example:
        >>> from specdec import EagleDrafter, zoo
        >>> from specdec.lab.training import TrainingTimeTest, new_head
        >>> target = zoo.load_target()
        >>> objective = TrainingTimeTest(EagleDrafter(new_head(target, "eagle3"), target), target)
        >>> optimizer = MuonAdamW(objective, lr=0.01, lr_others=0.01, weight_decay=0.1)
        >>> found = step_memory(objective, target, optimizer, torch.zeros(1, 33, dtype=torch.long))
        >>> found.most > found.target + found.head + found.optimizer
        True
    """
    live = LiveBytes()
    live.take_in([*target.parameters(), *target.buffers()])
    of_target = live.now
    live.take_in([*objective.parameters(), *objective.buffers()])
    of_head = live.now - of_target
    with live:
        for _ in range(2):
            for _ in range(min(batches, 2)):
                with autocast():
                    loss = objective(ids)
                loss.backward()
                del loss
            optimizer.step()
            optimizer.zero_grad()
    kept = leaves([*optimizer.state.values()])
    of_optimizer = sum(each.nbytes for _, each in kept if isinstance(each, Tensor))
    return StepMemory(of_target, of_head, of_optimizer, live.most)


def move_parameters(module: nn.Module, device: torch.device) -> None:
    """Moves parameters and buffers of fake tensors, for which `Module.to` raises an error.

    Args:
        module: whose parameters others may share.
        device: where they are wanted.
    """
    moved: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, weight in parameters_of(part).items():
            if weight is not None and weight.device.type != device.type:
                if id(weight) not in moved:
                    moved[id(weight)] = nn.Parameter(weight.data.to(device), weight.requires_grad)
                parameters_of(part)[name] = moved[id(weight)]
        for name, buffer in buffers_of(part).items():
            if buffer is not None and buffer.device.type != device.type:
                buffers_of(part)[name] = buffer.to(device)


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


def empty_target(name: str) -> PreTrainedModel:
    """A causal LM of a configuration, whose weights are not loaded."""
    name, dtype = place_of(name)
    config = load_pretrained("AutoConfig", name, local_files_only=find_pretrained(name))
    own = getattr(transformers, auto_class(config))
    dtype = (config.dtype or torch.float32) if dtype == "auto" else dtype
    return own.from_config(config, dtype=dtype)


def table_of(run: Run, others: list[str]) -> Table:
    """Of the run that `specdec train` would make of the same arguments."""
    args = arguments_of(run, others)
    without_data = FakeTensorMode(allow_non_fake_inputs=True)
    with without_data, torch.device(args.device):
        target = empty_target(run.target).eval()
        if run.length is None:
            args.row_lengths = row_lengths_of(args, target)
    target_ids = any_ids(run, target)  # their values are checked
    with without_data, torch.device(args.device):
        _, objective = objective_of(run, target, target_ids)
        ways = {"is_spread": run.spread_target, "is_sharded": run.shard_target}
        return memory_table(args, target, objective, **ways)


def main(arguments: list[str] | None = None) -> None:
    """Prints what a step takes in each process.

    Args:
        arguments: of the command line.
    """
    app = typer.Typer()
    others = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(context_settings=others)
    @ungrouped
    def memory(context: typer.Context, run: Run) -> None:
        """Memory of a training step, by the options of `specdec train`."""
        table = table_of(run, context.args)
        if os.environ.get("RANK", "0") == "0":
            print(table)

    app(arguments, standalone_mode=False)


if __name__ == "__main__":
    main()
