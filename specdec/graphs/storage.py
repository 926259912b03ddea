"""`stable_storage`: raises an error if a step moves the tensors that it owns, on any device.

A captured graph reads and writes the addresses that it saw at capture. A step that binds a name to
a new tensor (`x = x + 1` instead of `x += 1`) works eagerly, and freezes when it is replayed.
"""

from typing import Any

from torch import Tensor

from specdec.arguments import shown
from specdec.graphs.owned import owned_tensors


class StorageMovedError(RuntimeError):
    """A tensor that a step owns is at another address, or has another shape, than before."""


class stable_storage:  # noqa: N801 - a context manager, used like a function (as torch.no_grad)
    """Raises `StorageMovedError` if a tensor that an object owns was replaced, moved or reshaped.

    Args:
        owner: an object whose tensors are reached through containers and attributes, or a module
            (parameters and buffers); it may name attributes that every step makes anew in
            `transient_attributes`.

    Raises:
        ValueError: the owner has no tensors; where a step makes them, one has to run before.

    Example:
        >>> import torch
        >>> state = {"length": torch.zeros(2)}
        >>> with stable_storage(state) as storage:
        ...     state["length"] += 1
        >>> state["length"] = state["length"] + 1
        >>> storage.check()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        specdec.graphs.storage.StorageMovedError: ['length'] was replaced by another tensor; ...
    """

    def __init__(self, owner: Any):
        self._owner = owner
        # The tensors are held, so that no new tensor can get the address of one that was dropped.
        self._tensors = owned_tensors(owner)
        if not self._tensors:
            raise ValueError(
                f"no tensor can be reached from {shown(owner)}, so there is nothing to watch; pass "
                "the object whose tensors a step updates, after a first step if that makes them"
            )
        self._places = {name: _place(tensor) for name, tensor in self._tensors.items()}

    @property
    def names(self) -> list[str]:
        """Paths of the tensors that are watched."""
        return list(self._places)

    def check(self) -> None:
        """Compares now with the moment at which the guard was made.

        Raises:
            StorageMovedError: names the first tensor that differs.
        """
        now = owned_tensors(self._owner)
        for name, before in self._places.items():
            if name not in now:
                raise StorageMovedError(f"{name} is gone; a captured step would still write to it")
            after = _place(now[name])
            if after[0] != before[0]:
                raise StorageMovedError(
                    f"{name} was replaced by another tensor; a captured step goes on with the old "
                    "one: update it in place (copy_, +=, out=)"
                )
            if after != before:
                raise StorageMovedError(
                    f"{name} had shape {before[1]} and strides {before[2]}, and has {after[1]} and "
                    f"{after[2]}; a captured step keeps the first"
                )
        for name in now.keys() - self._places.keys():
            raise StorageMovedError(
                f"{name} is new; allocate it before the first step, or list the attribute in "
                "transient_attributes if no step reads what another one wrote there"
            )

    def __enter__(self) -> "stable_storage":
        return self

    def __exit__(self, error: type | None, *rest) -> None:
        if error is None:
            self.check()


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
