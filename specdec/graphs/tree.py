"""Nested tuples, lists, dictionaries and dataclasses of tensors, and the tensors of an object."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


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
