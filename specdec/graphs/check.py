"""What a replay and an eager call of the same function are compared by: every number that they
return or change, bit for bit.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from specdec.graphs.owned import owned_tensors
from specdec.graphs.tree import leaves
from specdec.torch_names import version_of


def changeable_tensors(function: Callable[..., Any], inputs: tuple) -> dict[str, Tensor]:
    """The tensors that a call may change, by name: its inputs, and what is reached from the
    function: what it closes over, an object whose method it is, buffers of modules, and globals
    that its code names. Parameters, which may be large, are left out.
    """
    found = _reached_tensors(function, inputs)
    return {name: x for name, x in found.items() if not isinstance(x, nn.Parameter)}


def parameter_versions(function: Callable[..., Any], inputs: tuple) -> dict[str, int]:
    """How often each parameter that is reached from a function was changed in place, by name; torch
    does not count this of tensors that were made in inference mode.
    """
    found = _reached_tensors(function, inputs)
    parameters = {name: x for name, x in found.items() if isinstance(x, nn.Parameter)}
    return {name: version_of(x) for name, x in parameters.items() if not x.is_inference()}


def _reached_tensors(function: Callable[..., Any], inputs: tuple) -> dict[str, Tensor]:
    found = {f"input {path}": x for path, x in leaves(inputs) if isinstance(x, Tensor)}
    found |= {name.removeprefix("."): x for name, x in owned_tensors(function).items()}
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, FunctionType):
        for name in _names_in(function.__code__) & function.__globals__.keys():
            of_global = owned_tensors(function.__globals__[name])
            found |= {f"{name}{path}": x for path, x in of_global.items()}
    return found


def restore(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Writes back what has changed, and nothing else: it may be memory that is only read."""
    for name, tensor in tensors.items():
        if why_different(tensor, values[name]):
            tensor.copy_(values[name])


def why_different(found: Any, expected: Any) -> str | None:
    """In words; `None` where two leaves are equal, bit for bit."""
    if not isinstance(found, Tensor):
        return None  # what is no tensor is the same in every call, see `Captured`
    kinds = [_kind(leaf) for leaf in (found, expected)]
    if kinds[0] != kinds[1]:
        return " and ".join(kinds)
    differs = _bits(found) != _bits(expected)
    if not bool(differs.any()):
        return None
    differs = differs.view(found.numel(), -1).any(dim=1)
    index = int(differs.nonzero()[0, 0])
    pair = " and ".join(str(x.flatten()[index].item()) for x in (found, expected))
    return f"{int(differs.sum())} of {found.numel()} numbers, the first of them {pair}"


def _names_in(code: CodeType) -> set[str]:
    """Names of globals and attributes in a function, and in those that are written inside of it."""
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    return {*code.co_names}.union(*map(_names_in, inner))


def _kind(leaf: Any) -> str:
    """Data type and shape of a tensor; other values as they are."""
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
