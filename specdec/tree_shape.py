"""Who hangs on whom in the window of a tree.

Legend: B rows, K nodes, N = K + 1 rows of a window, as in `types.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def ancestors(window_parents: Tensor, depth: int) -> Tensor:
    """See `Draft.ancestors`: of `Draft.window_parents` `[B, K]`."""
    rows, width = window_parents.shape
    # Products of 0 and 1, summed over at most D + 1 ancestors: exact in float32.
    table = window_parents.new_zeros((rows, width + 1, width + 1), dtype=torch.float32)
    table.diagonal(dim1=1, dim2=2).fill_(1)
    table[:, 1:].scatter_(2, window_parents[..., None], 1)
    for _ in range((depth - 1).bit_length()):
        table = (table @ table).clamp_(max=1)
    return table > 0


def earlier_siblings(window_parents: Tensor) -> Tensor:
    """See `Draft.earlier_siblings`."""
    return (window_parents[:, :, None] == window_parents[:, None, :]).tril(diagonal=-1)


def first_children(window_parents: Tensor, is_valid: Tensor) -> tuple[Tensor, Tensor]:
    """See `Draft.first_children`."""
    width = window_parents.shape[1]
    index = torch.arange(width, device=window_parents.device).masked_fill(~is_valid, width)
    first = index.new_full((len(index), width + 1), width)
    first.scatter_reduce_(1, window_parents, index, "amin")
    return first.clamp(max=max(width - 1, 0)), first < width


def depths_of(parents: Iterable[int]) -> list[int]:
    """How many tokens after the root each row of a tree's window is, given `Draft.parents` of one
    row as numbers of the host.

    Example:
        >>> depths_of([-1, 0, -1, 1])
        [0, 1, 2, 1, 3]
    """
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return depths
