"""Nested tuples, lists, dictionaries and dataclasses of tensors, the tensors of an object, and the
modules of a model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 8
"""Bytes at whose multiples every tensor of a transfer begins."""


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a tree that is no container, with its path, in order."""
    parts = _parts(tree)
    if parts is None:
        yield path, tree
        return
    for name, part in parts:
        yield from leaves(part, path + name)


def clone_tensors(tree: Any) -> Any:
    """The same tree with a copy of each tensor; one that is there twice gets two."""
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return type(tree)((key, clone_tensors(part)) for key, part in tree.items())
    if _is_record(tree):
        return replace(tree, **{f.name: clone_tensors(getattr(tree, f.name)) for f in fields(tree)})
    if isinstance(tree, tuple | list):
        return getattr(tree, "_make", type(tree))(map(clone_tensors, tree))
    return tree


def owned_tensors(owner: Any) -> dict[str, Tensor]:
    """The tensors that can be reached from an object through containers and attributes, by path.

    An object may name attributes that every step makes anew in `transient_attributes`; they are
    left out.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()

    def collect(part: Any, path: str) -> None:
        if isinstance(part, Tensor):
            found[path] = part
        elif id(part) not in seen and not isinstance(part, type):
            seen.add(id(part))
            parts = _parts(part)
            for name, child in _attributes(part) if parts is None else parts:
                collect(child, path + name)

    collect(owner, "")
    return found


def copy_from_host(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Copies each tensor into the one in its place, of the same shape and data type.

    A copy from ordinary memory makes the host wait until the device has done all that it was given
    before. Here one copy from pinned memory brings them all, and nobody waits for it: torch's
    allocator gives the pinned memory to nobody else before the device has read it.

    Args:
        into: tensors of one device.
        source: their new values, all of one device; those of a host are sent together.

    Example:
        >>> lengths, temperature = torch.zeros(2, dtype=torch.long), torch.zeros(2)
        >>> copy_from_host([lengths, temperature], [torch.tensor([3, 4]), torch.tensor([0.5, 1.0])])
        >>> lengths, temperature
        (tensor([3, 4]), tensor([0.5000, 1.0000]))
    """
    if into[0].is_cuda and not any(tensor.is_cuda for tensor in source):
        source = sent(source, into[0].device)
    for mine, theirs in zip(into, source, strict=True):
        mine.copy_(theirs)


def sent(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the host on a device, where they share one buffer."""
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]

    def parts(buffer: Tensor) -> list[Tensor]:
        pairs = zip(buffer.split(sizes), tensors, strict=True)
        return [part[: t.nbytes].view(t.dtype).view(t.shape) for part, t in pairs]

    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, tensor in zip(parts(buffer), tensors, strict=True):
        part.copy_(tensor)
    return parts(buffer.to(device, non_blocking=True))


def modules_of(*modules: nn.Module) -> list[nn.Module]:
    """Modules and all that they hold, each once, in the order of `nn.Module.modules()`, which takes
    five times as long: its generators are nested as deep as the modules are.

    Example:
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
        >>> modules_of(model) == list(model.modules())
        True
    """
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [*reversed(modules)]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = None
            if children := module._modules:
                waiting += reversed(children.values())
    return list(found)


def _parts(tree: Any) -> list[tuple[str, Any]] | None:
    """Named children of a container, `None` for anything else."""
    if isinstance(tree, dict):
        return [(f"[{key!r}]", part) for key, part in tree.items()]
    if _is_record(tree):
        return [(f".{f.name}", getattr(tree, f.name)) for f in fields(tree)]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", part) for name, part in zip(tree._fields, tree, strict=True)]
    if isinstance(tree, tuple | list):
        return [(f"[{i}]", part) for i, part in enumerate(tree)]
    return None


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    """Named attributes of an object that is no function."""
    transient = getattr(owner, "transient_attributes", ())
    found = {} if callable(owner) else getattr(owner, "__dict__", {})
    return [(f".{name}", part) for name, part in found.items() if name not in transient]


def _is_record(tree: Any) -> bool:
    return is_dataclass(tree) and not isinstance(tree, type)
