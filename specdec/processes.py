"""Processes that work together: which one this is, which part of the work is its own, and what all
of them agree on. `accelerate launch` and `torchrun` start them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from specdec.torch_names import parameters_of

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """The processes that share some work, one alone by default.

    Args:
        index: of this process.
        count: of all.
        does_all: every process does all of the work, since a part of the target is in each.

    Example:
        >>> Team(1, 3).part([0, 1, 2, 3, 4])
        [1, 4]
    """

    index: int = 0
    count: int = 1
    does_all: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process shows the progress."""
        return self.index == 0

    @property
    def is_writer(self) -> bool:
        """Whether this process writes what it has computed."""
        return self.is_first or not self.does_all

    def part(self, work: Sequence[T]) -> list[T]:
        """This process's part of some work."""
        return list(work) if self.does_all else list(work)[self.index :: self.count]

    def gather(self, found: list[T], error: Exception | None = None) -> list[T]:
        """What all processes found, in every process; all must call it. Where one passes an error,
        which it raises itself, the others end with exit status 2.
        """
        if self.does_all or self.count == 1:
            return found
        from accelerate.utils import gather_object

        everyone = gather_object([(found, error is not None)])
        if error is None and any(has_failed for _, has_failed in everyone):
            raise SystemExit(2)
        return [each for own, _ in everyone for each in own]

    def from_first(self, work: Callable[[], T]) -> T:
        """What `work` returns. Of processes that do all together the first one does it, and all
        have its result, or its error.
        """
        if not self.does_all:
            return work()
        result, error = None, None
        if self.is_first:
            try:
                result = work()
            except Exception as caught:
                error = caught
        result, error = broadcast([result, error])
        if error is not None:
            raise error
        return result


def team(model: nn.Module | None = None, *, share: bool = True) -> Team:
    """All processes that were started together.

    Args:
        model: the target. Where it is spread over the processes, each of them does all of the work.
        share: else each process is alone, but where the target is spread.

    Raises:
        ValueError: the target is spread over some of the processes only.
    """
    is_alone = int(os.environ.get("WORLD_SIZE", 1)) == 1 and not is_distributed()
    if is_alone or not (share or (model is not None and is_spread(model))):
        return Team()
    from accelerate import PartialState

    state = PartialState(cpu=not torch.accelerator.is_available())
    size = 1 if model is None else max([1, *(g.size() for g in _groups(model))])
    if size not in (1, state.num_processes):
        raise ValueError(
            f"the target is spread over {size} of {state.num_processes} processes, which cannot "
            f"share prompts; start {size} processes"
        )
    return Team(state.process_index, state.num_processes, does_all=size > 1)


def is_distributed() -> bool:
    """Whether this process can talk to others."""
    return distributed.is_available() and distributed.is_initialized()


def local_device(name: str) -> str:
    """The device of this process among those of a machine: `"cuda"` is `"cuda:1"` in the second.

    Example:
        >>> local_device("cpu")
        'cpu'
    """
    rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID"))
    if name != "cuda" or rank is None:
        return name
    count = torch.cuda.device_count() or int(rank) + 1  # srun may show each task its own alone
    return f"cuda:{int(rank) % count}"


def broadcast(values: list[Any]) -> list[Any]:
    """The values of the first process, in every process."""
    if is_distributed() and distributed.get_world_size() > 1:
        distributed.broadcast_object_list(values, src=0)
    return values


def any_of(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set in any process."""
    if not is_distributed():
        return flag
    value = torch.tensor(float(flag), device=device)
    distributed.all_reduce(value)
    return value.item() > 0


def average(tensors: list[torch.Tensor]) -> None:
    """Makes each tensor its mean over all processes, in place; all must bring the same shapes."""
    if is_distributed():
        for tensor in tensors:
            distributed.all_reduce(tensor.div_(distributed.get_world_size()))


def agreed(value: T, model: nn.Module) -> T:
    """The value of the first of the processes over which a model is spread. Each of them computes a
    part of one text, so none may choose by its own clock or its own random numbers.
    """
    values = [value]
    for group in _groups(model):
        distributed.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def rows_of_all(rows: torch.Tensor, model: nn.Module) -> tuple[list[torch.Tensor], int]:
    """The rows of all processes over which a model is spread, which compute one forward together
    and so must read the same rows; and which of them are this process's. Where all have the same,
    they are there once. Under FSDP2 the rows of other processes are not needed, since each computes
    its own.

    Args:
        rows: of the same shape in every process.
        model: the target.

    Example:
        >>> rows_of_all(torch.tensor([[1, 2]]), nn.Linear(1, 1))
        ([tensor([[1, 2]])], 0)
    """
    groups = _groups(model)
    if not groups or is_sharded(model):
        return [rows], 0
    (group,) = groups
    found = [torch.empty_like(rows) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(found, rows.contiguous(), group=group)
    if all(each.equal(rows) for each in found):
        return [rows], 0
    return found, distributed.get_rank(group)


def is_spread(model: nn.Module) -> bool:
    """Whether a part of the model is in each of several processes."""
    return any(group.size() > 1 for group in _groups(model))


def is_sharded(model: nn.Module) -> bool:
    """Whether a model is under FSDP2: its layers are gathered whenever they compute, so all of its
    processes must call it equally often, with rows of their own.
    """
    return any(isinstance(part, FSDPModule) for part in model.modules())


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """The weights of a module that are in parts (FSDP2) are whole in each process for a while, for
    reading; all processes must enter it. Other weights are left as they are.

    Example:
        >>> with gathered(layer := nn.Linear(1, 1)):
        ...     layer.weight.shape
        torch.Size([1, 1])
    """
    tables = map(parameters_of, module.modules())
    owned = [(own, name, weight) for own in tables for name, weight in own.items()]
    parts = [each for each in owned if isinstance(each[2], DTensor)]
    whole: dict[int, nn.Parameter] = {}  # one for a weight that several modules share
    for own, name, weight in parts:
        if id(weight) not in whole:
            values = weight.detach().full_tensor()
            whole[id(weight)] = nn.Parameter(values, requires_grad=weight.requires_grad)
        own[name] = whole[id(weight)]
    try:
        yield
    finally:
        for own, name, weight in parts:
            own[name] = weight


def _groups(model: nn.Module) -> list[Any]:
    """Over which a model's weights are spread."""
    spread = next((p for p in model.parameters() if isinstance(p, DTensor)), None)
    return [] if spread is None else spread.device_mesh.get_all_groups()
