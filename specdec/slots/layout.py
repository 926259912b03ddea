"""What is stored of a token, and where it lies: one tensor for all layers that store alike.

Legend: B rows, S slots, n tables of one shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class KeyValueShape(NamedTuple):
    """What one layer stores of one token."""

    num_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device


class Indexer(NamedTuple):
    """In place of a layer's index: the keys of its indexer, one head of them, without values."""

    layer: int


class Compressor(NamedTuple):
    """In place of a layer's index: what one of its compressors reads of a token; or its entries,
    each in the slot of its last token. One head of them, without values.
    """

    layer: int
    name: str  # HF's
    rate: int  # tokens of an entry
    is_entries: bool = False


Stored = int | Indexer | Compressor
"""What a table of a cache is of: keys and values of a layer, by its index, or something else."""


Places = dict[tuple, list[tuple[str, Stored]]]
"""What each store holds, by its shape, data type and device: keys or values, and of what."""


def allocate(
    batch_size: int, num_slots: int, shapes: Mapping[Stored, KeyValueShape]
) -> tuple[Places, list[Tensor]]:
    """What is where, and zeros for it: `[B, n, S + 1, heads, width]` for each shape."""
    places: Places = {}
    for layer, (heads, key_width, value_width, *where) in shapes.items():
        places.setdefault((heads, key_width, *where), []).append(("keys", layer))
        places.setdefault((heads, value_width, *where), []).append(("values", layer))
    stores = []
    for (heads, width, dtype, device), names in places.items():
        shape = len(names), batch_size, num_slots + 1, heads, width
        stores.append(torch.zeros(shape, dtype=dtype, device=device).transpose(0, 1))
    return places, stores


Tables = dict[Stored, Tensor]


def by_layer(places: Places, stores: Sequence[Tensor]) -> tuple[Tables, Tables]:
    """Keys and values, `[B, S + 1, heads, width]`."""
    found: dict[str, Tables] = {"keys": {}, "values": {}}
    for store, names in zip(stores, places.values(), strict=True):
        for place, (kind, layer) in enumerate(names):
            found[kind][layer] = store[:, place].detach()
    return found["keys"], found["values"]


def lines_and_heads(keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """The two readings of a layer's storage: one line per slot to write, by head to attend."""
    storage = keys, values
    lines = (buffer.flatten(0, 1) for buffer in storage)
    return *lines, *(buffer.transpose(1, 2) for buffer in storage)


def row_starts(stores: Sequence[Tensor]) -> dict[torch.device, Tensor]:
    """`[B, 1]` by device: where each row begins in a flat list of slots."""
    found = {}
    for store in stores:
        if store.device not in found:
            rows = torch.arange(store.shape[0], device=store.device)
            found[store.device] = rows[:, None] * store.shape[2]
    return found
