"""How much memory a training step takes, from running it on tensors without data.

Torch's fake tensors have shapes, types and devices, and their operations run no arithmetic. So the
step that will be trained is the estimate: no formula of ours stands between them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.graphs.tree import leaves
from specdec.torch_names import TorchDispatchMode, buffers_of, parameters_of


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
        >>> from specdec.lab.training.optimizer import MuonAdamW
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
