"""Nested tuples, lists, dictionaries and dataclasses of tensors, and the tensors that an object
owns.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a tree that is no container, with its path, in order.

    Args:
        tree: tensors and other values in nested tuples, lists, dictionaries and dataclasses.
        path: of the tree itself.

    Example:
        >>> list(leaves({"a": (1, None)}))
        [("['a'][0]", 1), ("['a'][1]", None)]
    """
    parts = _parts(tree)
    if parts is None:
        yield path, tree
        return
    for name, part in parts:
        yield from leaves(part, path + name)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same tree with `function(tensor)` in place of each tensor.

    Example:
        >>> import torch
        >>> map_tensors(torch.numel, ({"a": torch.zeros(2, 3)}, "b"))
        ({'a': 6}, 'b')
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return type(tree)((key, map_tensors(function, part)) for key, part in tree.items())
    if _is_record(tree):
        changed = {f.name: map_tensors(function, getattr(tree, f.name)) for f in fields(tree)}
        return replace(tree, **changed)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, part) for part in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(function, part) for part in tree)
    return tree


def owned_tensors(owner: Any) -> dict[str, Tensor]:
    """The tensors that can be reached from an object through containers and attributes, by path.

    An object may name attributes that every step makes anew in `transient_attributes`; they are
    left out.

    Example:
        >>> import torch
        >>> class Counter:
        ...     transient_attributes = ("scratch",)
        ...     def __init__(self):
        ...         self.counts, self.scratch = torch.zeros(2), torch.zeros(3)
        >>> list(owned_tensors({"a": Counter()}))
        ["['a'].counts"]
    """
    found: dict[str, Tensor] = {}
    _collect(owner, "", found, set())
    return found


def _collect(owner: Any, path: str, found: dict[str, Tensor], seen: set[int]) -> None:
    if isinstance(owner, Tensor):
        found[path] = owner
        return
    if id(owner) in seen or isinstance(owner, type):
        return
    parts = _parts(owner)
    if parts is None and hasattr(owner, "__dict__") and not callable(owner):
        transient = getattr(owner, "transient_attributes", ())
        attributes = vars(owner).items()
        parts = [(f".{name}", part) for name, part in attributes if name not in transient]
    if parts is None:
        return
    seen.add(id(owner))
    for name, part in parts:
        _collect(part, path + name, found, seen)


def _parts(tree: Any) -> list[tuple[str, Any]] | None:
    """Named children of a container, `None` for anything else."""
    if isinstance(tree, Tensor):
        return None
    if isinstance(tree, dict):
        return [(f"[{key!r}]", part) for key, part in tree.items()]
    if _is_record(tree):
        return [(f".{f.name}", getattr(tree, f.name)) for f in fields(tree)]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", part) for name, part in zip(tree._fields, tree, strict=True)]
    if isinstance(tree, tuple | list):
        return [(f"[{i}]", part) for i, part in enumerate(tree)]
    return None


def _is_record(tree: Any) -> bool:
    return is_dataclass(tree) and not isinstance(tree, type)
