"""Trees of tensors (nested tuples, lists, dictionaries, named tuples and dataclasses), the tensors
of an object, and the modules of a model.

All that a batch keeps between steps is one tree whose tensors have rows first: `[B, ...]`. What is
the same for all rows stands in fields that are `shared()`. So what happens to a batch (rows leave,
another call begins, tests poison it) is a function of the tree, and no part of it has methods of
its own for that.

A dataclass is its fields. What else its objects hold, views of the fields for instance, is made by
`__post_init__`, which runs again where a function returns a tree of other tensors.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, fields, is_dataclass
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from specdec.torch_names import buffers_of, children_of, parameters_of

ALIGNMENT = 8
"""Bytes at whose multiples every tensor of a transfer begins."""
_HAS_ROWS = "specdec.has_rows"
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def shared(**options: Any) -> Any:
    """A field of a dataclass without rows: the same for all texts, and never changed.

    Args:
        options: of `dataclasses.field`.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch
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
    parts = _parts(tree, with_shared)
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
        for _, part in _parts(tree) or ():
            yield from parts_of(part, kind)


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any, *, with_shared: bool = True) -> Any:
    """The same tree with each tensor changed; one that is there twice is changed twice.

    Args:
        change: of a tensor.
        tree: left as it is.
        with_shared: whether what has no rows is changed as well.
    """
    changed = partial(map_tensors, change, with_shared=with_shared)
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return type(tree)((key, changed(part)) for key, part in tree.items())
    if _is_record(tree):
        other = object.__new__(type(tree))
        for f in fields(tree):
            part, is_kept = getattr(tree, f.name), not (with_shared or _has_rows(f))
            object.__setattr__(other, f.name, part if is_kept else changed(part))
        if hasattr(other, "__post_init__"):
            other.__post_init__()
        return other
    if isinstance(tree, tuple | list | deque):
        return getattr(tree, "_make", type(tree))(map(changed, tree))
    return tree


def rows_to_keep(is_live: list[bool]) -> list[int]:
    """The live rows of a batch, in the order in which they fill its first rows: the last of them
    move into the gaps and all others stay where they are, so that few rows move.

    Example:
        >>> rows_to_keep([True, False, True, False, True, True])
        [0, 5, 2, 4]
    """
    live = [row for row, lives in enumerate(is_live) if lives]
    return [row if is_live[row] else live.pop() for row in range(len(live))]


def keep_rows(tree: Any, rows: list[int]) -> Any:
    """Some rows of all tables, moved to their fronts: nothing is allocated, and a second call with
    the same rows changes nothing, so tables may share storage.

    Args:
        tree: its tables `[B, ...]` are overwritten; until they are filled anew only what is
            returned may be used.
        rows: from `rows_to_keep`. Each is at its index already or comes from after all rows that
            are kept (`rows[i] == i` or `rows[i] >= len(rows)`), so none is overwritten before it
            has been read.

    Returns:
        The tree of the fronts `[len(rows), ...]`: row i of a table is what row `rows[i]` was.

    Example:
        >>> import torch
        >>> keep_rows({"ids": torch.tensor([10, 20, 30, 40])}, [0, 3])
        {'ids': tensor([10, 40])}
    """

    def front(table: Tensor) -> Tensor:
        for here, there in enumerate(rows):
            if here != there:
                table[here].copy_(table[there])
        return table[: len(rows)]

    return map_tensors(front, tree, with_shared=False)


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


def size_bytes(owner: Any) -> int:
    """Bytes of all storage that an object owns, see `owned_tensors`."""
    stores = (tensor.untyped_storage() for tensor in owned_tensors(owner).values())
    return sum({store.data_ptr(): store.nbytes() for store in stores}.values())


def owned_tensors(owner: Any) -> dict[str, Tensor]:
    """The tensors that can be reached from an object through containers and attributes, by path:
    of a module its parameters, buffers and children, of a function what it closes over, of a bound
    method its object.

    An object may name attributes that every step makes anew in `transient_attributes`; they are
    left out.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
        >>> list(owned_tensors({"model": model}))[:3]
        ["['model'].0.weight", "['model'].0.bias", "['model'].1.running_mean"]
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

    buffer = torch.empty(
        sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda", device="cpu"
    )
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


def _parts(tree: Any, with_shared: bool = True) -> list[tuple[str, Any]] | None:
    """Named children of a container, `None` for anything else."""
    if isinstance(tree, dict):
        return [(f"[{key!r}]", part) for key, part in tree.items()]
    if _is_record(tree):
        wanted = (f.name for f in fields(tree) if with_shared or _has_rows(f))
        return [(f".{name}", getattr(tree, name)) for name in wanted]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", part) for name, part in zip(tree._fields, tree, strict=True)]
    if isinstance(tree, tuple | list | deque):
        return [(f"[{i}]", part) for i, part in enumerate(tree)]
    return None


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    """What an object that is no container holds, by name."""
    if isinstance(owner, type | ModuleType | BuiltinFunctionType):
        return []
    if isinstance(owner, FunctionType):
        cells = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
        found = {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    elif isinstance(owner, MethodType):
        found = {"__self__": owner.__self__}
    elif isinstance(owner, partial):
        found = {"func": owner.func, "args": owner.args, "keywords": owner.keywords}
    elif isinstance(owner, nn.Module):
        own = {name: part for name, part in vars(owner).items() if name not in _OF_EVERY_MODULE}
        found = {**own, **parameters_of(owner), **buffers_of(owner), **children_of(owner)}
    else:
        found = getattr(owner, "__dict__", {})
    transient = getattr(owner, "transient_attributes", ())
    return [(f".{name}", part) for name, part in found.items() if name not in transient]


def _has_rows(of_record: Any) -> bool:
    return of_record.metadata.get(_HAS_ROWS, True)


def _is_record(tree: Any) -> bool:
    return is_dataclass(tree) and not isinstance(tree, type)


def _is_same(value: Any, other: Any) -> bool:
    return value is other or bool(value == other)


def _shown(leaf: Any) -> str:
    return f"a tensor {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
