"""Settings as plain values: what a run was made with, and in what two runs differ."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_VERSIONED = ("builtins", "specdec", "torch", "transformers")
"""Packages whose versions are saved beside the settings."""
_SAMPLED = 256
"""Elements of a tensor that a fingerprint reads: a large model takes milliseconds."""


def settings_of(part: Any) -> dict[str, Any]:
    """The settings of a part: its class, with the source of a user's own, its public attributes
    that are plain values (numbers, texts, tensors, records and lists of these), functions that are
    fields of a record, and a fingerprint of a module's weights.

    Args:
        part: any object.

    Example:
        >>> from specdec import PromptLookupDrafter
        >>> settings_of(PromptLookupDrafter(4))["max_ngram"]
        3
    """
    attributes = getattr(part, "__dict__", {})
    names = [name for name in attributes if not name.startswith("_")]
    if is_dataclass(part):
        names = [field.name for field in fields(part)]
    if isinstance(part, nn.Module):
        names = [name for name in names if name != "training"]
    found = {name: getattr(part, name) for name in names}
    functions = {n: f for n, f in found.items() if is_dataclass(part) and type(f) is FunctionType}
    found = {name: plain(value) for name, value in found.items() if _is_plain(value)}
    found |= {name: settings_of_function(value) for name, value in functions.items()}
    settings = {"class": type(part).__name__, **source_of(type(part)), **found}
    weights = list(part.parameters()) if isinstance(part, nn.Module) else []
    if weights:
        settings["parameters"] = sum(weight.numel() for weight in weights)
        settings["weights"] = fingerprint(weights)
    return settings


def called(settings: Mapping[str, Any]) -> str:
    """A part in a headline: its class and those of its settings that are numbers.

    Args:
        settings: of `settings_of`.

    Example:
        >>> from specdec import BlockSampler, TypicalSampler
        >>> called(TypicalSampler(epsilon=0.2).settings()), called(BlockSampler().settings())
        ('TypicalSampler(epsilon=0.2, delta=0.09)', 'BlockSampler')
    """
    said = {"class", "source", "lossless", "parameters", "weights"}
    pairs = [(n, v) for n, v in settings.items() if n not in said]
    shown = [f"{n}={v}" for n, v in pairs if isinstance(v, bool | int | float)]
    return settings["class"] + f"({', '.join(shown)})" * bool(shown)


def settings_of_function(function: Callable) -> dict[str, Any]:
    """The same of a function of the user's own: its name, its source, and the plain values that it
    closes over.

    Example:
        >>> def adding(number):
        ...     return lambda x: x + number
        >>> settings_of_function(adding(3))["number"]
        3
    """
    if not isinstance(function, FunctionType):
        return settings_of(function)
    held = inspect.getclosurevars(function).nonlocals
    found = {name: plain(value) for name, value in held.items() if _is_plain(value)}
    return {"function": plain(function), **source_of(function), **found}


def source_of(kind: type | FunctionType) -> dict[str, str]:
    """Of a class or function of the user's own, a fingerprint of the file that defines it or, in a
    notebook, of its own lines: what was edited is another part.
    """
    if kind.__module__.partition(".")[0] in _VERSIONED:
        return {}
    with suppress(OSError, TypeError):  # of a class that was typed at a prompt nothing is known
        file = Path(inspect.getsourcefile(kind) or "")
        lines = file.read_bytes() if file.is_file() else inspect.getsource(kind).encode()
        return {"source": hashlib.sha256(lines).hexdigest()[:16]}
    return {}


def plain(value: Any) -> Any:
    """A value as JSON can hold it, the same in every process.

    Args:
        value: of any type.

    Example:
        >>> plain((1, torch.float16, len))
        [1, 'torch.float16', 'builtins.len']
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, Tensor):
        return {"shape": list(value.shape), "sha256": fingerprint([value])}
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    named = getattr(value, "__qualname__", None)  # of functions and classes
    return f"{value.__module__}.{named}" if named else settings_of(value)


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """16 hexadecimal digits of shapes and evenly spaced values of tensors, the same for the same
    values in any data type that holds them, on any device.

    It tells models apart, trained and untrained ones for instance; it does not see a change of a
    few single weights.

    Args:
        tensors: in a fixed order.

    Example:
        >>> fingerprint([torch.ones(3)]) == fingerprint([-torch.ones(3)])
        False
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        tensor = tensor.detach()
        digest.update(repr(tuple(tensor.shape)).encode())
        if tensor.is_meta:
            continue
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        values = local.reshape(-1)[:: max(1, local.numel() // _SAMPLED)]
        values = values if values.is_complex() else values.to(torch.float32)
        digest.update(values.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """In what settings differ, by dotted names: `name (theirs there, ours here)`.

    Args:
        theirs, ours: as JSON holds them.

    Example:
        >>> differences({"plan": {"seed": 1}, "K": 4}, {"plan": {"seed": 2}, "K": 4})
        ['plan.seed (1 there, 2 here)']
    """
    if theirs.get("class") != ours.get("class"):  # nothing else can be compared
        return [f"class ({_shown(theirs.get('class'))} there, {_shown(ours.get('class'))} here)"]
    found = []
    for name in sorted(theirs.keys() | ours.keys()):
        a, b = theirs.get(name), ours.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += [f"{name}.{difference}" for difference in differences(a, b)]
        elif a != b:
            found.append(f"{name} ({_shown(a)} there, {_shown(b)} here)")
    return found


def _is_plain(value: Any) -> bool:
    """Whether an attribute is a setting, not a part of its own."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(item) for item in value)
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in value.values())
    kinds = bool | int | float | str | Tensor | torch.dtype | torch.device
    return value is None or isinstance(value, kinds) or is_dataclass(value)


def _shown(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, Mapping) and "class" in value:
        return str(value["class"])
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
