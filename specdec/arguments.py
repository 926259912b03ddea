"""Checks of arguments at the public edge; each message names the expected and the given value.

A value of another type raises `TypeError`, a value out of range or a name that does not exist
`ValueError`. No check waits for a device, but for a number that is a tensor there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn


def plain_number(value: Any) -> Any:
    """The Python number in a scalar of NumPy's or in a tensor without dimensions; any other value
    as it is.

    Example:
        >>> import numpy as np
        >>> plain_number(np.int64(3)), plain_number(torch.tensor(0.5)), plain_number("3")
        (3, 0.5, '3')
    """
    return value.item() if getattr(value, "ndim", None) == 0 else value


def plain_numbers(value: Any) -> Any:
    """The same for numbers in a list or a tuple; arrays and tensors become lists.

    Example:
        >>> import numpy as np
        >>> plain_numbers([np.float32(0.5), 1]), plain_numbers(torch.tensor([2, 3]))
        ([0.5, 1], [2, 3])
    """
    if hasattr(value, "ndim"):
        return value.tolist()
    if type(value) in (list, tuple):
        is_plain = set(map(type, value)) <= {int, float, NoneType}
        return value[:] if is_plain else type(value)(map(plain_numbers, value))
    return value


def name_of(part: object) -> str:
    """What messages call a part: its attribute `name` where that is a text, as of a foreign rule; a
    function's own name; else its class's.

    Example:
        >>> name_of(nn.Identity()), name_of(plain_number)
        ('Identity', 'plain_number')
    """
    names = (getattr(part, name, None) for name in ("name", "__name__"))
    return next((name for name in names if isinstance(name, str)), type(part).__name__)


def check_integer(
    name: str, value: Any, low: int | None = None, high: int | None = None, *, advice: str = ""
) -> int:
    """Returns an integer in `low..high`, a Python number for one of NumPy's; a boolean is none.

    Example:
        >>> check_integer("batch_size", 0, 1)
        Traceback (most recent call last):
            ...
        ValueError: batch_size must be an integer >= 1, got 0
    """
    value, expected = plain_number(value), f"an integer{_range(low, high)}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(message(name, expected, value, advice))
    if (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(message(name, expected, value, advice))
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
    """Returns a finite number in `low..high`, or between `above` and `below`, a Python number for
    one of NumPy's; a boolean is none.

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
    value, expected = plain_number(value), f"a number{_range(low, high)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(message(name, expected, value, advice))
    is_in = (low is None or value >= low) and (high is None or value <= high)
    if above is not None and not value > above:
        expected, is_in = f"a number > {above}", False
    elif below is not None and not value < below:
        expected, is_in = f"a number < {below}", False
    if not is_in or not math.isfinite(value):
        raise ValueError(message(name, expected, value, advice))
    return value


def check_choice(name: str, value: Any, choices: Iterable[Any], *, advice: str = "") -> Any:
    """Returns one of the values that are allowed; 1 is not `True`.

    Example:
        >>> check_choice("proposal", "samples", ("sample", "argmax"))
        Traceback (most recent call last):
            ...
        ValueError: proposal must be 'sample' or 'argmax', got 'samples'
    """
    choices, value = tuple(choices), plain_number(value)
    if any(type(value) is type(choice) and value == choice for choice in choices):
        return value
    raise ValueError(message(name, _listed([*map(repr, choices)]), value, advice))


def check_device(name: str, value: Any) -> torch.device:
    """Returns the device that a value names.

    Example:
        >>> check_device("device", "gpu")
        Traceback (most recent call last):
            ...
        ValueError: device must be a torch device such as 'cpu' or 'cuda:0', got 'gpu'
    """
    said = message(name, "a torch device such as 'cpu' or 'cuda:0'", value)
    if isinstance(value, bool) or not isinstance(value, str | int | torch.device):
        raise TypeError(said)
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise ValueError(said) from error


def check_placement(what: str, own: torch.device, target: torch.device) -> None:
    """Raises `ValueError` for a part of a drafter on another device than the target.

    Example:
        >>> check_placement("the head", torch.device("cpu"), torch.device("cuda"))
        Traceback (most recent call last):
            ...
        ValueError: the head is on cpu and the target on cuda; move it with drafter.to('cuda')
    """
    if own != target:
        raise ValueError(
            f"{what} is on {own} and the target on {target}; move it with "
            f"drafter.to({str(target)!r})"
        )


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
        raise TypeError(message(name, "a tensor", value))
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


def check_function(name: str, value: Any, what: str) -> Callable:
    """Returns what can be called.

    Example:
        >>> check_function("progress", True, "one that wraps a list, such as tqdm")
        Traceback (most recent call last):
            ...
        TypeError: progress must be a function (one that wraps a list, such as tqdm), got True
    """
    if not callable(value):
        raise TypeError(message(name, f"a function ({what})", value))
    return value


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
    plain = bool | int | float | str | bytes | NoneType | list | tuple | set | dict | torch.dtype
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


def message(name: str, expected: str, value: Any, advice: str = "") -> str:
    """What an error says of an argument."""
    return f"{name} must be {expected}, got {shown(value)}{advice and '; '}{advice}"


def _range(low: float | None, high: float | None) -> str:
    if low is None:
        return ""
    return f" >= {low}" if high is None else f" in {low}..{high}"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
