"""Checks of arguments at the public edge; each message names the expected and the given value.

A value of another type raises `TypeError`, a value out of range or a name that does not exist
`ValueError`. No check waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn


def check_integer(
    name: str, value: Any, low: int | None = None, high: int | None = None, *, advice: str = ""
) -> int:
    """Returns an integer in `low..high`; a boolean is none.

    Example:
        >>> check_integer("batch_size", 0, 1)
        Traceback (most recent call last):
            ...
        ValueError: batch_size must be an integer >= 1, got 0
    """
    expected = f"an integer{_range(low, high)}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(_message(name, expected, value, advice))
    if (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(_message(name, expected, value, advice))
    return value


def check_number(
    name: str,
    value: Any,
    low: float | None = None,
    high: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
    advice: str = "",
) -> float:
    """Returns a finite number in `low..high`, or between `above` and `below`; a boolean is none.

    Args:
        name: of the argument, for the message.
        value: what was given.
        low, high: ends of the range, themselves allowed.
        above, below: ends that are not.
        advice: what to do instead, appended to the message.

    Example:
        >>> check_number("epsilon", 1.5, 0, 1)
        Traceback (most recent call last):
            ...
        ValueError: epsilon must be a number in 0..1, got 1.5
    """
    expected = f"a number{_range(low, high)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(_message(name, expected, value, advice))
    is_in = (low is None or value >= low) and (high is None or value <= high)
    if above is not None and not value > above:
        expected, is_in = f"a number > {above}", False
    elif below is not None and not value < below:
        expected, is_in = f"a number < {below}", False
    if not is_in or not math.isfinite(value):
        raise ValueError(_message(name, expected, value, advice))
    return value


def check_choice(name: str, value: Any, choices: Iterable[Any], *, advice: str = "") -> Any:
    """Returns one of the values that are allowed; 1 is not `True`.

    Example:
        >>> check_choice("proposal", "samples", ("sample", "argmax"))
        Traceback (most recent call last):
            ...
        ValueError: proposal must be 'sample' or 'argmax', got 'samples'
    """
    choices = tuple(choices)
    if any(type(value) is type(choice) and value == choice for choice in choices):
        return value
    raise ValueError(_message(name, _listed([*map(repr, choices)]), value, advice))


def check_device(name: str, value: Any) -> torch.device:
    """Returns the device that a value names.

    Example:
        >>> check_device("device", "gpu")
        Traceback (most recent call last):
            ...
        ValueError: device must be a torch device such as 'cpu' or 'cuda:0', got 'gpu'
    """
    message = _message(name, "a torch device such as 'cpu' or 'cuda:0'", value)
    if isinstance(value, bool) or not isinstance(value, str | int | torch.device):
        raise TypeError(message)
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise ValueError(message) from error


def check_tensor(
    name: str,
    value: Any,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype] = (),
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Returns a tensor of a shape, data type and device.

    Args:
        name: of the argument, for the message.
        value: what was given.
        shape: `None` stands for any size.
        dtypes: one of these; empty for all.
        device: where the tensor must be; `None` for anywhere.

    Example:
        >>> check_tensor("tokens", torch.zeros(2, 3), (2, None), (torch.long,))
        Traceback (most recent call last):
            ...
        TypeError: tokens must be int64, got float32
    """
    if not isinstance(value, Tensor):
        raise TypeError(_message(name, "a tensor", value))
    own = value.shape
    wrong = len(own) != len(shape)
    if not wrong:
        for want, size in zip(shape, own, strict=False):
            wrong |= want is not None and want != size
    if wrong:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{sizes}], got {list(own)}")
    if dtypes and value.dtype not in dtypes:
        words = " or ".join(map(_dtype_name, dtypes))
        raise TypeError(f"{name} must be {words}, got {_dtype_name(value.dtype)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on {device}, got a tensor on {value.device}")
    return value


def check_path(name: str, value: Any, *, what: str = "a file or a folder") -> Path:
    """Returns a path that a file system can have; nothing needs to be there.

    Args:
        name: of the argument, for the message.
        value: a string or a `Path`.
        what: is expected there, for the message.
    """
    message = _message(name, f"the path of {what}", value)
    if not isinstance(value, str | Path):
        raise TypeError(message)
    try:
        if not str(value) or "\0" in str(value):
            raise OSError
        Path(value).exists()
    except OSError as error:  # such as a name that is too long
        raise ValueError(message) from error
    return Path(value)


def shown(value: Any) -> str:
    """A value as messages show it: short, and without the contents of tensors and models.

    Example:
        >>> shown(torch.zeros(2, 3)), shown([1] * 99)[:12], shown(torch.nn.ReLU), shown(None)
        ('a float32 tensor of shape [2, 3]', '[1, 1, 1, 1,', 'the class ReLU', 'None')
    """
    if isinstance(value, Tensor):
        return f"a {_dtype_name(value.dtype)} tensor of shape {list(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    plain = bool | int | float | str | bytes | NoneType | list | tuple | set | dict
    if not isinstance(value, plain) or _holds_tensors(value):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        value = [*value.values()]
    if not isinstance(value, list | tuple | set):
        return isinstance(value, Tensor | nn.Module)
    return any(map(_holds_tensors, value))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _message(name: str, expected: str, value: Any, advice: str = "") -> str:
    return f"{name} must be {expected}, got {shown(value)}{advice and '; '}{advice}"


def _range(low: float | None, high: float | None) -> str:
    if low is None:
        return ""
    return f" >= {low}" if high is None else f" in {low}..{high}"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


# Everything below goes away with its last caller.

_WORDS = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a dictionary",
    NoneType: "None",
    Callable: "a function",
}


def check_type(name: str, value: Any, hint: Any, *, advice: str = "") -> Any:
    """Returns the value, if it is of the type that a hint names."""
    if _fits(value, hint):
        return value
    message = _message(name, _words(hint), value, advice)
    raise (ValueError if _is_name(hint) and isinstance(value, str) else TypeError)(message)


def check_fields(record: Any) -> None:
    """Checks every field of a dataclass against its type hint."""
    kind = type(record)
    hints = hints_of(kind)
    for field in fields(record):
        check_type(f"{kind.__name__}.{field.name}", getattr(record, field.name), hints[field.name])


def check_options(options: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Checks options against their type hints; names without a hint are left to the caller."""
    for name, value in options.items():
        if name in hints:
            check_type(name, value, hints[name])


@cache
def hints_of(kind: type) -> dict[str, Any]:
    """The type hints of a class's own annotations: a dataclass, or a `TypedDict` of options."""
    return get_type_hints(kind)


def check_folder(name: str, value: Any) -> Path:
    """Returns a folder that files can be written into, if the path can be one; makes nothing."""
    path = check_path(name, value, what="a folder")
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not there.is_dir():
        raise ValueError(f"{name} must be the path of a folder, but {there} is a file")
    return path


def make_folder(name: str, value: Any) -> Path:
    """Returns a folder that files can be written into, and makes it where it is not there."""
    path = check_folder(name, value)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{name} {path} cannot be made: {error.strerror}") from error
    return path


def check_file(name: str, value: Any) -> Path:
    """Returns the path of a file that can be written: in a folder that is there."""
    path = check_path(name, value, what="a file")
    if path.is_dir():
        raise ValueError(f"{name} must be the path of a file, but {path} is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"{name} must be the path of a file, but there is no folder {path.parent}")
    return path


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the type that a hint names."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if hint is None or hint is NoneType:
        return value is None
    if hint is bool or hint is str:
        return isinstance(value, hint)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is Callable or origin is Callable:
        return callable(value)
    if origin is Literal:
        return any(type(value) is type(arg) and value == arg for arg in args)
    if origin in (Union, UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(args) == 2 and args[1] is Ellipsis:
            return all(_fits(item, args[0]) for item in value)
        return len(value) == len(args) and all(map(_fits, value, args))
    if origin is not None:
        if isinstance(value, str | bytes) or not isinstance(value, origin):
            return False
        items = value.values() if issubclass(origin, Mapping) else value
        return all(_fits(item, args[-1]) for item in items) if args else True
    return not isinstance(hint, type) or isinstance(value, hint)


def _words(hint: Any) -> str:
    """A type hint in words, for error messages."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal or origin in (Union, UnionType):
        return _listed([*_choices(hint)])
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return f"a tuple whose items are each {_words(args[0])}"
    if origin is not None and origin is not Callable and args:
        return f"a {origin.__name__.lower()} whose items are each {_words(args[-1])}"
    if hint in _WORDS or origin in _WORDS:
        return _WORDS.get(hint) or _WORDS[origin]
    name = getattr(hint, "__name__", str(hint))
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _choices(hint: Any) -> Iterator[str]:
    """The alternatives of a type hint in words."""
    if get_origin(hint) is Literal:
        yield from map(repr, get_args(hint))
    elif get_origin(hint) in (Union, UnionType):
        for arg in get_args(hint):
            yield from ("True", "False") if arg is bool else _choices(arg)
    else:
        yield _words(hint)


def _is_name(hint: Any) -> bool:
    """Whether a hint lists names, alone or beside other types but strings."""
    if get_origin(hint) in (Union, UnionType):
        return any(map(_is_name, get_args(hint)))
    return get_origin(hint) is Literal and any(isinstance(arg, str) for arg in get_args(hint))
