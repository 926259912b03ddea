"""Slots of one cache copied over those of another one, for drafters that read a part of a text."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specdec.slots.cache import SlotCache
from specdec.slots.layout import Stored


def copy_slots(cache: SlotCache, other: SlotCache, slots: Mapping[Stored, Tensor]) -> None:
    """Copies some slots of another cache's rows over all slots of the rows of `cache`.

    Args:
        cache: is overwritten.
        other: of as many rows.
        slots: by layer `[B, S + 1]` int64, which slot of the other each of these is a copy of,
            the padding slot's included; `[B, S + 1, heads]` where heads take their own.
    """
    flat: dict[tuple, Tensor] = {}  # lines of a flat list, once for layers that share slots
    for layer, sources in slots.items():
        device, heads = cache.keys[layer].device, sources.shape[2] if sources.dim() == 3 else 1
        if (name := (id(sources), device)) not in flat:
            lines = sources.to(device).view(*sources.shape[:2], heads)
            lines = (lines + other.row_starts[device][..., None]) * heads
            flat[name] = (lines + torch.arange(heads, device=device)).flatten()
        for mine, theirs in (
            (cache.keys[layer], other.keys[layer]),
            (cache.values[layer], other.values[layer]),
        ):
            if not mine.shape[3]:  # an indexer has no values
                continue
            width = mine.shape[2] * mine.shape[3] // heads
            mine, theirs = (_in_long_words(x.view(-1, width)) for x in (mine, theirs))
            torch.index_select(theirs, 0, flat[name], out=mine)


def _in_long_words(lines: Tensor) -> Tensor:
    """`[S, W]` as 64-bit words, where these fit: copied in a fraction of the time that as many
    entries of 16 bits take on a GPU.
    """
    sizes = lines.shape[1], lines.storage_offset()
    fits = all(size * lines.element_size() % 8 == 0 for size in sizes)
    return lines.view(torch.int64) if fits else lines
