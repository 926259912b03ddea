"""The tensors that an object owns, found through its containers and attributes."""

from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from specdec.graphs.tree import named_parts
from specdec.torch_names import buffers_of, children_of, parameters_of

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


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
            parts = named_parts(part)
            for name, child in _attributes(part) if parts is None else parts:
                collect(child, path + name)

    collect(owner, "")
    return found


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
