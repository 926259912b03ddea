"""Whether there is room on a device for the storage of so many rows."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from specdec.slots.layout import KeyValueShape, Stored


def check_room(
    batch_size: int,
    num_slots: int,
    shapes: Mapping[Stored, KeyValueShape],
    others: Iterable[tuple[torch.device, int]] = (),
) -> None:
    """Raises `ValueError` for a cache that is larger than a device's whole memory, and says how
    many rows fit at most.

    Args:
        batch_size, num_slots, shapes: as of `SlotCache`.
        others: bytes of each row besides, by device, of recurrent states.
    """
    needs = Counter[torch.device]()
    for heads, key_width, value_width, dtype, device in shapes.values():
        needs[device] += num_slots * heads * (key_width + value_width) * dtype.itemsize
    what = "keys and values"
    for device, kept in others:
        needs[device] += kept
        what = "keys, values and recurrent states"
    for device, needed in needs.items():
        there = memory_bytes(device)
        if there is not None and batch_size * needed > there:
            raise ValueError(
                f"{what} of {batch_size} rows of {num_slots} tokens take "
                f"{batch_size * needed / 2**30:.1f} GiB, and {device} has {there / 2**30:.1f} GiB "
                f"in all; generate at most {there // needed} rows at a time, or shorter ones"
            )


def memory_bytes(device: torch.device) -> int | None:
    """All of a device's memory; `None` where it is not known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu" and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
