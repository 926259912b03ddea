"""Checks of arguments that are paths."""

from pathlib import Path
from typing import Any

from specdec.arguments import message


def check_path(name: str, value: Any, *, what: str = "a file or a folder") -> Path:
    """Returns a path that a file system can have; nothing needs to be there.

    Args:
        name: of the argument, for the message.
        value: a string or a `Path`.
        what: is expected there, for the message.
    """
    said = message(name, f"the path of {what}", value)
    if not isinstance(value, str | Path):
        raise TypeError(said)
    try:
        if not str(value) or "\0" in str(value):
            raise OSError
        Path(value).exists()
    except OSError as error:  # such as a name that is too long
        raise ValueError(said) from error
    return Path(value)


def check_folder(name: str, value: Any) -> Path:
    """Returns the path of a folder, which need not be there; a file is none.

    Example:
        >>> check_folder("output", __file__)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        ValueError: output must be a folder, and ... is a file
    """
    path = check_path(name, value, what="a folder")
    if path.is_file():
        raise ValueError(f"{name} must be a folder, and {path} is a file")
    return path
