"""Trees of other tensors: each tensor changed, or the rows of a batch that go on.

What else the objects of a dataclass hold, views of its fields for instance, is made by
`__post_init__`, which runs again for a tree of other tensors.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from torch import Tensor

from specdec.graphs.tree import has_rows, is_record


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any, *, with_shared: bool = True) -> Any:
    """The same tree with each tensor changed; one that is there twice is changed twice.

    Args:
        change: of a tensor.
        tree: left as it is.
        with_shared: whether what has no rows is changed as well.
    """
    changed = partial(map_tensors, change, with_shared=with_shared)
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return type(tree)((key, changed(part)) for key, part in tree.items())
    if is_record(tree):
        other = object.__new__(type(tree))
        for f in fields(tree):
            part, is_kept = getattr(tree, f.name), not (with_shared or has_rows(f))
            object.__setattr__(other, f.name, part if is_kept else changed(part))
        if hasattr(other, "__post_init__"):
            other.__post_init__()
        return other
    if isinstance(tree, tuple | list | deque):
        return getattr(tree, "_make", type(tree))(map(changed, tree))
    return tree


def rows_to_keep(is_live: list[bool]) -> list[int]:
    """The live rows of a batch, in the order in which they fill its first rows: the last of them
    move into the gaps and all others stay where they are, so that few rows move.

    Example:
        >>> rows_to_keep([True, False, True, False, True, True])
        [0, 5, 2, 4]
    """
    live = [row for row, lives in enumerate(is_live) if lives]
    return [row if is_live[row] else live.pop() for row in range(len(live))]


def keep_rows(tree: Any, rows: list[int]) -> Any:
    """Some rows of all tables, moved to their fronts: nothing is allocated, and a second call with
    the same rows changes nothing, so tables may share storage.

    Args:
        tree: its tables `[B, ...]` are overwritten; until they are filled anew only what is
            returned may be used.
        rows: from `rows_to_keep`. Each is at its index already or comes from after all rows that
            are kept (`rows[i] == i` or `rows[i] >= len(rows)`), so none is overwritten before it
            has been read.

    Returns:
        The tree of the fronts `[len(rows), ...]`: row i of a table is what row `rows[i]` was.

    Example:
        >>> import torch
        >>> keep_rows({"ids": torch.tensor([10, 20, 30, 40])}, [0, 3])
        {'ids': tensor([10, 40])}
    """

    def front(table: Tensor) -> Tensor:
        for here, there in enumerate(rows):
            if here != there:
                table[here].copy_(table[there])
        return table[: len(rows)]

    return map_tensors(front, tree, with_shared=False)
