"""Errors of a filter's values, and of what are no logits of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor

from specdec.arguments import shown


def refuse_count(name: str, count: int, rows: int) -> NoReturn:
    """Raises an error for so many values of a batch."""
    raise ValueError(
        f"{name} has {count} values for a batch of {rows} rows; give one per row, or a single value"
    )


def check_values(
    name: str, values: Sequence[Any], expected: str, is_valid: Callable[[float], bool]
) -> None:
    """Raises `ValueError` for the first row whose value is not what is expected, in words."""
    for row, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_valid(value):
            raise ValueError(f"{name} must be {expected}, got {shown(value)} in row {row}")


def refuse_logits(logits: Any, rows: int) -> NoReturn:
    """Raises an error for what are no logits of so many rows."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(f"logits must be a tensor of floats, got {shown(logits)}")
    raise ValueError(f"logits must be [{rows}, V] or [{rows}, N, V], got {list(logits.shape)}")
