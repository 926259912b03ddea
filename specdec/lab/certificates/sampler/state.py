"""Whether a rule is a function of its draft, its logits and its numbers, or changes with each call.

An exact distribution says nothing of the five thousandth call of a rule that counts its calls. So
everything that can be reached from a rule is taken down before and after a call that repeats the
one before it: attributes, tensors, closures, what is set in its class, and what its functions read
from their own module. What is made once and kept, a mask for instance, does not change then; a
count does.

Nothing is seen of what a library keeps, of the clock, of files, nor of generators of random
numbers: a rule with numbers of its own is tested by draws.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.arguments import shown
from specdec.lab.certificates.sampler.paths import Paths
from specdec.lab.certificates.sampler.problems import Problems
from specdec.samplers import Sampler
from specdec.torch_names import version_of

_LIBRARIES = {"specdec", *sys.stdlib_module_names}
"""Whose own classes and functions are not looked into, nor are those of installed packages."""

_ROWS = 8
"""Drafts that a rule is called with."""

_MOST = 2**12
"""Numbers of a tensor that are looked at: all of a smaller one, so many of a larger one, of which
torch counts the changes."""


def changed_by_a_call(
    sampler: Sampler, problems: Problems, device: torch.device | str = "cpu"
) -> str | None:
    """What a call that repeats the one before it changes in a rule, or any call in its draft and
    logits, in words; `None` for nothing.

    Args:
        sampler: is called twice.
        problems: the drafts are some of these.
        device: where it runs.
    """
    paths = Paths(problems, device=device)
    rows = torch.linspace(0, len(paths) - 1, min(len(paths), _ROWS), device="cpu").long()
    draft, logits, logits_filter = paths.inputs(rows)
    start, found = torch.full((len(rows),), 7, device=device), []
    given = {"the logits": logits, "draft.tokens": draft.tokens, "draft.probs": draft.probs}
    given = {name: tensor for name, tensor in given.items() if tensor is not None}
    before = {name: _content(tensor) for name, tensor in given.items()}
    for _ in range(2):
        noise = sampler.noise_type(list(range(len(rows))), device=device)
        sampler(draft, logits, logits_filter, noise.at(start, logits.shape[1]))
        found.append(dict(_reached(sampler)))
    for name, tensor in given.items():
        if _content(tensor) != before[name]:
            return f"a call writes into what it is given: {name}"
    for name in dict.fromkeys(chain(*found)):
        was, now = (state.get(name, "nothing") for state in found)
        if was != now:
            told = f" ({shown(was)}, then {shown(now)})" if isinstance(now, str) else ""
            return f"a call that repeats the one before it changes {name}{told}"
    return None


def _reached(rule: object) -> Iterator[tuple[str, Any]]:
    """Names of what can be reached from a rule, and values that are equal where nothing changed."""
    todo: list[tuple[str, object]] = [(type(rule).__name__, rule)]
    seen, kept = set(), []
    while todo:
        name, value = todo.pop()
        if value is None or isinstance(value, int | float | complex | str | bytes | Enum):
            yield name, repr(value)  # in which NaN is NaN
            continue
        if id(value) in seen or _is_of_a_library(value):
            continue
        seen.add(id(value))
        kept.append(value)  # so that its id is not given to another object
        if isinstance(value, Tensor):
            yield name, _content(value)
        inside = list(_inside(name, value))
        yield f"the size of {name}", len(inside)
        if not inside and not isinstance(value, Tensor):
            yield name, repr(value)
        todo += inside


def _is_of_a_library(value: object) -> bool:
    """A module, a generator of random numbers, or a class or function of a library."""
    if isinstance(value, types.ModuleType | types.CodeType | torch.Generator):
        return True
    if type(value).__module__.split(".")[:2] in (["random"], ["numpy", "random"]):
        return True
    if not isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return False
    root = (value.__module__ or "builtins").split(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return root in _LIBRARIES or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _inside(name: str, value: object) -> Iterator[tuple[str, object]]:
    """What an object holds."""
    if isinstance(value, Mapping):
        for key, each in list(value.items()):
            yield f"{name}[{shown(key)}]", each
    elif isinstance(value, list | tuple | set | frozenset) or hasattr(value, "popleft"):
        for number, each in enumerate(value):
            yield f"{name}[{number}]", each
    elif isinstance(value, types.FunctionType):
        with suppress(ValueError):  # a closure that is not filled yet
            read = inspect.getclosurevars(value)
            for key, each in (read.nonlocals | read.globals).items():
                yield f"{key} of {name}", each
        yield f"the defaults of {name}", (value.__defaults__, value.__kwdefaults__)
    elif isinstance(value, types.MethodType):
        yield from ((name, value.__func__), (f"self of {name}", value.__self__))
    elif isinstance(value, functools.partial):
        yield f"the function of {name}", (value.func, value.args, value.keywords)
    elif isinstance(value, classmethod | staticmethod):
        yield name, value.__func__
    elif isinstance(value, property):
        yield name, value.fget
    for key, each in list(getattr(value, "__dict__", {}).items()):
        if key not in ("__dict__", "__weakref__", "__doc__"):
            yield f"{name}.{key}", each
    for kind in type(value).__mro__:
        yield from (
            (f"{name}.{key}", getattr(value, key))
            for key in getattr(kind, "__slots__", ())
            if isinstance(key, str) and not key.startswith("__") and hasattr(value, key)
        )
        if not isinstance(value, type):
            yield kind.__name__, kind


def _content(tensor: Tensor) -> tuple:
    """A value that is equal for tensors of equal bits."""
    numbers = tensor.detach().flatten()
    changes = 0 if tensor.is_inference() or numbers.numel() <= _MOST else version_of(tensor)
    numbers = numbers[:: max(numbers.numel() // _MOST, 1)].cpu()
    numbers = numbers.clone(memory_format=torch.contiguous_format)  # of stride 1, even if single
    bits = hash(numbers.view(torch.uint8).numpy().tobytes())
    return str(tensor.dtype), tuple(tensor.shape), changes, bits
