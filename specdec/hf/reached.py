"""What HF hands to a function, which then need not run: `generate` to a decoding method, a whole
model to its decoder.
"""

from collections.abc import Callable
from typing import Any


class ReachedError(Exception):
    """A function was reached; `args` are what it was handed."""


def reached_by(call: Callable[..., Any], *args: Any, **options: Any) -> tuple | None:
    """What a call hands to the function in it that raises `ReachedError`; `None` if none does.

    Example:
        >>> def decode(ids):
        ...     raise ReachedError(ids)
        >>> reached_by(decode, [5, 6])
        ([5, 6],)
    """
    try:
        call(*args, **options)
    except ReachedError as reached:
        return reached.args
    return None
