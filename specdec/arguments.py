"""Checks of arguments, with one style of message: what was expected, and what came."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def check_count(name: str, value: Any, *, least: int = 1, most: int | None = None) -> None:
    """Raises `ValueError` unless a value is an integer of a range.

    Args:
        name: of the argument.
        value: of the argument; a boolean is no integer.
        least, most: ends of the range; `None` has no end.

    Example:
        >>> check_count("rounds", 0)
        Traceback (most recent call last):
        ...
        ValueError: rounds must be an integer >= 1, got 0
    """
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < least or (most is not None and value > most):
        known = f"integer >= {least}" if most is None else f"integer in {least}..{most}"
        raise ValueError(f"{name} must be an {known}, got {_shown(value)}")


def check_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> None:
    """Raises `ValueError` unless a value is a finite number of a range.

    Args:
        name: of the argument.
        value: of the argument; a boolean is no number.
        least, above: lower end of the range, itself inside or outside.
        most, below: upper end, likewise.

    Example:
        >>> check_number("step_weight", float("nan"), above=0)
        Traceback (most recent call last):
        ...
        ValueError: step_weight must be a finite number > 0, got nan
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_valid = is_number and math.isfinite(value)
    is_valid = is_valid and (least is None or value >= least) and (above is None or value > above)
    is_valid = is_valid and (most is None or value <= most) and (below is None or value < below)
    if not is_valid:
        ends = {">=": least, ">": above, "<=": most, "<": below}
        known = " and ".join(f"{sign} {end:g}" for sign, end in ends.items() if end is not None)
        kind = "a finite number" if is_number and not math.isfinite(value) else "a number"
        raise ValueError(f"{name} must be {f'{kind} {known}'.strip()}, got {_shown(value)}")


def check_flag(name: str, value: Any) -> None:
    """Raises `TypeError` unless a value is `True` or `False`.

    Args:
        name: of the argument.
        value: of the argument.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {_shown(value)}")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raises `ValueError` unless a value is one of several names.

    Args:
        name: of the argument.
        value: of the argument.
        choices: all names.
    """
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        known = ", ".join(map(repr, choices))
        raise ValueError(f"{name} must be one of {known}, got {_shown(value)}")


def check_type(name: str, value: Any, kinds: type | tuple[type, ...], hint: str = "") -> None:
    """Raises `TypeError` unless a value is of one of several types.

    Args:
        name: of the argument.
        value: of the argument.
        kinds: a type or several.
        hint: what to do instead.

    Example:
        >>> check_type("stats", [], dict, "pass result.stats")
        Traceback (most recent call last):
        ...
        TypeError: stats must be a dict, got a list; pass result.stats
    """
    if not isinstance(value, kinds):
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        names = " or ".join(_with_article(kind.__name__) for kind in kinds)
        got = "None" if value is None else _with_article(type(value).__name__)
        raise TypeError(f"{name} must be {names}, got {got}" + (f"; {hint}" if hint else ""))


def check_file(name: str, path: Any) -> Path:
    """The path of a file that is to be written.

    Args:
        name: of the argument.
        path: of the argument; its folder must be there.

    Raises:
        TypeError: no path.
        ValueError: a folder, or a file in a folder that is not there.
    """
    path = check_path(name, path)
    if path.is_dir():
        raise ValueError(f"{name} must be a file, got the folder {str(path)!r}")
    if not path.parent.is_dir():
        raise ValueError(f"{name} is to be in the folder {str(path.parent)!r}, which is not there")
    return path


def check_folder(name: str, path: Any) -> Path:
    """The path of a folder that is to be written to; it need not be there.

    Args:
        name: of the argument.
        path: of the argument.

    Raises:
        TypeError: no path.
        ValueError: a file, or a folder that cannot be made.
    """
    path = check_path(name, path)
    there = next((p for p in (path, *path.parents) if p.exists()), path)
    if not there.is_dir():
        raise ValueError(
            f"{name} must be a folder, got {str(path)!r}, and {str(there)!r} is a file"
        )
    if not os.access(there, os.W_OK):
        raise ValueError(f"{name} is {str(path)!r}, and {str(there)!r} cannot be written to")
    return path


def check_path(name: str, path: Any) -> Path:
    """A path of a file system.

    Args:
        name: of the argument.
        path: of the argument, a `str` or a `Path`.

    Raises:
        TypeError: something else.
        ValueError: an empty text, or one that no file can have for a name.
    """
    if not isinstance(path, str | Path):
        raise TypeError(f"{name} must be a path, a str or a Path, got {_shown(path)}")
    if str(path) == "" or "\0" in str(path):
        raise ValueError(f"{name} must be the name of a file or folder, got {_shown(path)}")
    try:
        Path(path).exists()
    except OSError as error:  # names that are too long
        raise ValueError(f"{name} cannot be a path: {error.strerror}") from error
    return Path(path)


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


def _shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({type(value).__name__})"
