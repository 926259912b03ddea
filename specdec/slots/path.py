"""What an accepted path of a tree has stored becomes that of a chain."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def follow(
    stores: Iterable[Tensor], row_starts: Mapping[torch.device, Tensor], start: Tensor, path: Tensor
) -> None:
    """See `SlotCache.follow`; `stores` and `row_starts` are the cache's."""
    sources = start[:, None] + path[:, 1:]
    targets = start[:, None] + torch.arange(1, path.shape[1], device=path.device)
    for store in stores:
        lines = store.transpose(0, 1).flatten(1, 2)  # [n, B (S + 1), heads, width]
        starts = row_starts[store.device]
        here, there = ((s.to(store.device) + starts).flatten() for s in (sources, targets))
        lines.index_copy_(1, there, lines.index_select(1, here))
