"""Trees of tensors (nested tuples, lists, dictionaries, named tuples and dataclasses), and the
modules of a model.

All that a batch keeps between steps is one tree whose tensors have rows first: `[B, ...]`. What is
the same for all rows stands in fields that are `shared()`. So what happens to a batch (rows leave,
another call begins, tests poison it) is a function of the tree, and no part of it has methods of
its own for that. A dataclass is its fields.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import field, fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from specdec.torch_names import buffers_of, children_of, parameters_of

_HAS_ROWS = "specdec.has_rows"


def shared(**options: Any) -> Any:
    """A field of a dataclass without rows: the same for all texts, and never changed.

    Args:
        options: of `dataclasses.field`.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> from specdec.graphs.rows import keep_rows
        >>> @dataclass
        ... class State:
        ...     counts: Tensor
        ...     weights: Tensor = shared()
        >>> state = State(torch.tensor([1, 2, 3]), torch.tensor([0.5, 0.5]))
        >>> fill(state, 7)
        >>> keep_rows(state, [0])
        State(counts=tensor([7]), weights=tensor([0.5000, 0.5000]))
    """
    return field(metadata={_HAS_ROWS: False}, **options)


def leaves(tree: Any, path: str = "", *, with_shared: bool = True) -> Iterator[tuple[str, Any]]:
    """Everything in a tree that is no container, with its path, in order."""
    parts = named_parts(tree, with_shared)
    if parts is None:
        yield path, tree
        return
    for name, part in parts:
        yield from leaves(part, path + name, with_shared=with_shared)


def tables(tree: Any) -> dict[str, Tensor]:
    """The tensors that have rows, by path."""
    found = leaves(tree, with_shared=False)
    return {path: leaf for path, leaf in found if isinstance(leaf, Tensor)}


def parts_of(tree: Any, kind: type) -> Iterator[Any]:
    """All parts of a tree that are of a class."""
    if isinstance(tree, kind):
        yield tree
    else:
        for _, part in named_parts(tree) or ():
            yield from parts_of(part, kind)


def fill(tree: Any, value: float) -> None:
    """Writes a number into all tables: 0 clears them."""
    for table in tables(tree).values():
        table.fill_(value)


def copy_into(tree: Any, other: Any) -> None:
    """Copies every tensor of another tree into the tensor in its place; those of a host are sent
    together, and nobody waits for them (`copy_from_host`). One on torch's device `meta` has no
    data, and nothing is copied.

    Raises:
        ValueError: a tensor of another shape, or another value of something that is no tensor;
            nothing was copied.

    Example:
        >>> import torch
        >>> state = {"ids": torch.zeros(2, dtype=torch.long)}
        >>> copy_into(state, {"ids": torch.tensor([3, 4])})
        >>> state
        {'ids': tensor([3, 4])}
    """
    pairs = []
    for (path, mine), (_, theirs) in zip(leaves(tree), leaves(other), strict=True):
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor) and mine.shape == theirs.shape:
            pairs.append((mine, theirs))
        elif isinstance(mine, Tensor) or isinstance(theirs, Tensor) or not _is_same(mine, theirs):
            raise ValueError(f"{path} is {_shown(mine)} and cannot take over {_shown(theirs)}")
    pairs = [(a, b) for a, b in pairs if not b.is_meta and a.data_ptr() != b.data_ptr()]
    if pairs:
        copy_from_host(*zip(*pairs, strict=True))


def copy_from_host(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Copies each tensor into the one in its place, of the same shape and data type.

    A copy from ordinary memory makes the host wait until the device has done all that it was given
    before. Here one copy from pinned memory brings them all, and nobody waits for it: torch's
    allocator gives the pinned memory to nobody else before the device has read it.

    Args:
        into: tensors of one device.
        source: their new values, all of one device; those of a host are sent together.

    Example:
        >>> import torch
        >>> lengths, temperature = torch.zeros(2, dtype=torch.long), torch.zeros(2)
        >>> copy_from_host([lengths, temperature], [torch.tensor([3, 4]), torch.tensor([0.5, 1.0])])
        >>> lengths, temperature
        (tensor([3, 4]), tensor([0.5000, 1.0000]))
    """
    if into[0].is_cuda and not any(tensor.is_cuda for tensor in source):
        from specdec.graphs.sending import sent

        source = sent(source, into[0].device)
    for mine, theirs in zip(into, source, strict=True):
        mine.copy_(theirs)


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
            if children := children_of(module):
                waiting += reversed(children.values())
    return list(found)


def weight_addresses(*modules: nn.Module) -> tuple[int, ...]:
    """Addresses of all parameters and buffers: a graph that was captured over other ones must not
    be replayed.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> before = weight_addresses(layer)
        >>> _ = layer.weight.data.add_(1)
        >>> weight_addresses(layer) == before
        True
        >>> layer.weight = nn.Parameter(layer.weight.clone())
        >>> weight_addresses(layer) == before
        False
    """
    tensors: list[Tensor | None] = []
    for part in modules_of(*modules):  # faster than parameters(), and made in every call
        if table := parameters_of(part):
            tensors += table.values()
        if table := buffers_of(part):
            tensors += table.values()
    return tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])


def named_parts(tree: Any, with_shared: bool = True) -> list[tuple[str, Any]] | None:
    """Named children of a container, `None` for anything else."""
    if isinstance(tree, dict):
        return [(f"[{key!r}]", part) for key, part in tree.items()]
    if is_record(tree):
        wanted = (f.name for f in fields(tree) if with_shared or has_rows(f))
        return [(f".{name}", getattr(tree, name)) for name in wanted]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", part) for name, part in zip(tree._fields, tree, strict=True)]
    if isinstance(tree, tuple | list | deque):
        return [(f"[{i}]", part) for i, part in enumerate(tree)]
    return None


def has_rows(of_record: Any) -> bool:
    """Whether a field of a dataclass is not `shared()`."""
    return of_record.metadata.get(_HAS_ROWS, True)


def is_record(tree: Any) -> bool:
    """Whether it is an object of a dataclass."""
    return is_dataclass(tree) and not isinstance(tree, type)


def _is_same(value: Any, other: Any) -> bool:
    return value is other or bool(value == other)


def _shown(leaf: Any) -> str:
    return f"a tensor {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
