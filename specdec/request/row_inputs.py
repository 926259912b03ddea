"""Row inputs: named values that steps read of each row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from specdec.arguments import shown
from specdec.targets import Target


def read_row_inputs(given: Any, rows: int, copies: int = 1) -> dict[str, Tensor]:
    """Values as tensors `[B, ...]` of the host: int64, float32 or bool.

    Args:
        given: by name, tensors or sequences of B values, or of one for each prompt; `None` for no
            inputs.
        rows: B.
        copies: rows of each prompt.

    Raises:
        TypeError, ValueError: what is no such table; says which.

    Example:
        >>> read_row_inputs({"adapter": [0, 2]}, rows=4, copies=2)
        {'adapter': tensor([0, 0, 2, 2])}
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"row_inputs must be a dict of tensors by name, got {shown(given)}")
    found = {}
    for name, value in given.items():
        try:
            table = torch.as_tensor(value, device="cpu").detach()
            if table.is_floating_point():  # numbers of Python's would be of the default data type
                table = torch.as_tensor(value, dtype=torch.float32, device="cpu").detach()
        except (TypeError, ValueError, RuntimeError) as error:
            got = shown(value)
            raise TypeError(
                f"row_inputs[{name!r}] must be a tensor or a sequence of numbers, got {got}; "
                "nothing but 'adapter' has values that are names"
            ) from error
        if table.dim() and copies > 1 and len(table) * copies == rows:
            table = table.repeat_interleave(copies, dim=0)
        if table.dim() == 0 or len(table) != rows:
            raise ValueError(
                f"row_inputs[{name!r}] has shape {list(table.shape)} for a batch of {rows} rows; "
                "rows come first"
            )
        dtype = torch.float32 if table.is_floating_point() else torch.long
        found[name] = table if table.dtype == torch.bool else table.to(dtype)
    offset = found.get("position_offset")
    if offset is not None and (offset.dtype != torch.long or offset.dim() > 1 or offset.min() < 0):
        raise ValueError(
            f"row_inputs['position_offset'] must be an integer >= 0 for each row, got "
            f"{shown(given['position_offset'])}"
        )
    return found


def offsets_among(row_inputs: Mapping[str, Tensor]) -> Iterable[int]:
    """By how much the positions of each row are moved on: 0 where nothing says so."""
    offset = row_inputs.get("position_offset")
    return repeat(0) if offset is None else offset.tolist()


def read_by(request: Any, target: Target, drafter: Any) -> None:
    """Lets a drafter read the sources of a call, where it has any.

    Raises:
        TypeError: a name of a row input that neither of them declares.
    """
    if hasattr(request.row_inputs, "source"):
        from specdec.request.source import read_by_drafter

        read_by_drafter(request.row_inputs, drafter)
    refuse_unknown(request.row_inputs, (target, drafter))


def refuse_unknown(names: Iterable[str], parts: Sequence[Any]) -> None:
    """Raises `TypeError` for a name of a row input that no part of a generator declares."""
    known = {name: part for part in reversed(parts) for name in part.row_inputs}
    for name in names:
        if name not in known:
            said = ", ".join(f"{n!r} ({type(part).__name__})" for n, part in known.items())
            raise TypeError(
                f"nobody reads row_inputs[{name!r}]; known are {said}. A drafter declares its own "
                "in Drafter.row_inputs, an edit in its attribute row_inputs"
            )


def row_inputs_of(
    target: Target, given: Mapping[str, Any] | None, rows: int, copies: int
) -> dict[str, Tensor]:
    """`read_row_inputs`, with adapters by name as numbers."""
    if hasattr(given, "source"):
        from specdec.request.source import with_source

        return with_source(target, given, row_inputs_of(target, given.others, rows, copies), rows)
    # A drafter may declare an input of this name, of numbers, for a target without adapters.
    adapters = given.get("adapter") if isinstance(given, Mapping) else None
    if adapters is not None and ("adapter" in target.row_inputs or _are_names(adapters)):
        given = {**given, "adapter": target.adapter_indices(adapters)}
    return read_row_inputs(given, rows, copies)


def _are_names(given: Any) -> bool:
    """A text, or a sequence with texts in it."""
    is_list = isinstance(given, Sequence)
    return isinstance(given, str) or (is_list and any(isinstance(one, str) for one in given))
