"""`SlotCache`: keys and values in preallocated slots, one length per row.

A token at position p of its row lives in slot p. Rows therefore start at slot 0 whatever the
padding of the input was, a row forgets by shortening its length, and ragged acceptance is the
normal case. Slots at or beyond a row's length hold garbage that the attention mask hides until it
is overwritten; within a row nothing is ever moved or zeroed. The cache does not know the rows'
lengths: the slots of a window's tokens are arguments of the window.

Legend: B rows, N tokens of a window, S slots.
"""

import copy
import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from specdec.kernels import write_slots, writes_slots
from specdec.types import keep_rows

SLOT_MULTIPLE = 16
"""Numbers of slots are multiples of this, so that every row of a mask starts at an address that
every attention backend can read (cuDNN's needs 16 bytes, in half precision 8 slots).
"""


def round_up(count: int) -> int:
    """The least multiple of `SLOT_MULTIPLE` that is at least `count`.

    Example:
        >>> round_up(1), round_up(16), round_up(17)
        (16, 16, 32)
    """
    return -(-count // SLOT_MULTIPLE) * SLOT_MULTIPLE


class KeyValueShape(NamedTuple):
    """What one layer stores of one token."""

    num_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device


class Window:
    """Where the tokens of one forward sit, and what is caught while it runs.

    Args:
        slots: `[B, N]` int64, the slot (= position) of each token; the cache's `trash` slot for a
            token to forget.
        num_attended: how many slots the forward attends over, a multiple of `SLOT_MULTIPLE`.
        layer_windows: sliding window of each attention layer by its index, `None` for full
            attention; layers that are left out attend fully.

    Attributes:
        masks: additive masks of this forward, made on first use (attention.py).
        features: hidden states of this forward by feature layer, where they are wanted.
    """

    __slots__ = ("_slots_there", "features", "layer_windows", "masks", "num_attended", "slots")

    def __init__(
        self,
        slots: Tensor,
        num_attended: int,
        layer_windows: Mapping[int, int | None] | None = None,
    ):
        self.slots = slots
        self.num_attended = num_attended
        self.layer_windows = layer_windows or {}
        self.masks: dict[tuple, Tensor] = {}
        self.features: dict[int | str, Tensor] = {}
        self._slots_there: dict[torch.device, Tensor] = {slots.device: slots}

    def slots_on(self, device: torch.device) -> Tensor:
        """`slots` on another device, copied once."""
        if device not in self._slots_there:
            self._slots_there[device] = self.slots.to(device)
        return self._slots_there[device]

    def over_layers(self, layer_windows: Mapping[int, int | None]) -> "Window":
        """The same window for layers with other sliding windows; masks are shared."""
        other = Window(self.slots, self.num_attended, layer_windows)
        other.masks, other._slots_there = self.masks, self._slots_there
        return other


def check_room(batch_size: int, num_slots: int, shapes: Mapping[int, KeyValueShape]) -> None:
    """Refuses a cache that is larger than a device's whole memory.

    Args:
        batch_size: rows B.
        num_slots: slots of each row.
        shapes: what each layer stores, by layer index.

    Raises:
        ValueError: says how many rows fit at most.
    """
    row_bytes: dict[torch.device, int] = {}
    for heads, key_width, value_width, dtype, device in shapes.values():
        token_bytes = heads * (key_width + value_width) * dtype.itemsize
        row_bytes[device] = row_bytes.get(device, 0) + num_slots * token_bytes
    for device, needed in row_bytes.items():
        there = memory_bytes(device)
        if there is not None and batch_size * needed > there:
            raise ValueError(
                f"keys and values of {batch_size} rows of {num_slots} tokens take "
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


class SlotCache(Cache):
    """Static key/value storage for B rows of S slots, written in place, that an HF model sees as
    its cache.

    Args:
        batch_size: rows B.
        num_slots: slots of each row: the longest sequence plus one window; rounded up to a multiple
            of `SLOT_MULTIPLE`.
        shapes: what each layer stores, by layer index.

    Attributes:
        keys: by layer `[B, S + 1, heads, key_width]`, the last slot is `trash`.
        values: by layer `[B, S + 1, heads, value_width]`.

    Example:
        >>> shape = KeyValueShape(2, 8, 8, torch.float32, torch.device("cpu"))
        >>> cache = SlotCache(batch_size=3, num_slots=50, shapes={0: shape, 1: shape})
        >>> cache.num_slots, cache.keys[1].shape
        (64, torch.Size([3, 65, 2, 8]))
    """

    transient_attributes = ("window", "_flat_slots")
    """Made anew by every window: no step reads what another one wrote there."""

    def __init__(self, batch_size: int, num_slots: int, shapes: Mapping[int, KeyValueShape]):
        super().__init__(layers=[])
        self.num_rows = batch_size
        self.num_slots = round_up(num_slots)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._row_starts: dict[torch.device, Tensor] = {}  # of the rows in a flat list of slots
        self.window: Window | None = None
        length = self.num_slots + 1
        for layer, (heads, key_width, value_width, dtype, device) in shapes.items():
            where = {"dtype": dtype, "device": device}
            self.keys[layer] = torch.zeros(batch_size, length, heads, key_width, **where)
            self.values[layer] = torch.zeros(batch_size, length, heads, value_width, **where)
            if device not in self._row_starts:
                rows = torch.arange(batch_size, device=device)
                self._row_starts[device] = rows[:, None] * length
        self._make_views()

    @property
    def trash(self) -> int:
        """The one extra slot, never attended to, where tokens go that must not be remembered."""
        return self.num_slots

    @property
    def size_bytes(self) -> int:
        """Bytes held by keys and values."""
        return sum(buffer.nbytes for buffer in (*self.keys.values(), *self.values.values()))

    def open_window(
        self,
        slots: Tensor,
        *,
        num_attended: int,
        layer_windows: Mapping[int, int | None] | None = None,
    ) -> Window:
        """Names the slots of the next forward.

        Args:
            slots: `[B, N]` int64.
            num_attended: upper bound of the slots that the forward needs (largest real slot + 1),
                known to the host.
            layer_windows: see `Window`.

        Returns:
            The window to hand to the model call.
        """
        attended = min(round_up(num_attended), self.num_slots)
        self.window = Window(slots, attended, layer_windows)
        self._flat_slots: dict[torch.device, Tensor] = {}
        return self.window

    def _flat_slots_on(self, device: torch.device) -> Tensor:
        """The window's slots in a flat list of the slots of all rows, made on first use."""
        if device not in self._flat_slots:
            there, starts = self.window.slots_on(device), self._row_starts[device]
            one_row = self.num_rows == 1
            self._flat_slots[device] = there.squeeze(0) if one_row else (there + starts).flatten()
        return self._flat_slots[device]

    def reset(self) -> None:
        """Zeroes all slots, for other texts: a masked slot has weight 0, but a NaN that a broken
        model left there would still be one.
        """
        for buffer in (*self.keys.values(), *self.values.values()):
            buffer.zero_()

    def keep(self, rows: list[int]) -> "SlotCache":
        """A cache of the given rows in this one's storage, which must not be used while the other
        is; see `keep_rows`.
        """
        kept = copy.copy(self)
        kept.num_rows = len(rows)
        kept.keys = {i: keep_rows(keys, rows) for i, keys in self.keys.items()}
        kept.values = {i: keep_rows(values, rows) for i, values in self.values.items()}
        kept._row_starts = {d: starts[: len(rows)] for d, starts in self._row_starts.items()}
        kept._make_views()
        return kept

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """HF's entry: writes `[B, heads, N, width]` states at the window's slots, returns
        `[B, heads, num_attended, width]` views.
        """
        keys, values = self._views[layer_idx]
        if key_states.is_cuda and writes_slots(key_states, self.keys[layer_idx]):
            slots = self.window.slots_on(key_states.device)
            storage = self.keys[layer_idx], self.values[layer_idx]
            write_slots(*storage, key_states, value_states, slots)
        else:
            self._write(*keys, key_states)
            self._write(*values, value_states)
        attended = self.window.num_attended
        return keys[1].narrow(2, 0, attended), values[1].narrow(2, 0, attended)

    def _write(self, by_slot: Tensor, by_head: Tensor, states: Tensor) -> None:
        slots = self._flat_slots_on(by_slot.device)
        if self.num_rows == 1:  # with one row, slots need no row offset
            by_head.index_copy_(2, slots, states)
        else:
            by_slot.index_copy_(0, slots, states.transpose(1, 2).flatten(0, 1))

    def _make_views(self) -> None:
        """The two readings of a layer's storage: one line per slot to write, by head to attend."""
        self._views = {
            layer: [
                (buffer.flatten(0, 1), buffer.transpose(1, 2))
                for buffer in (self.keys[layer], self.values[layer])
            ]
            for layer in self.keys
        }

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Called by HF to get a length; positions are always passed, so a bound is enough."""
        return self.window.num_attended

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Called by HF to get mask sizes: (slots attended over, offset)."""
        return self.window.num_attended, 0


class ShapeRecorder(Cache):
    """Sees what the layers of a model store of one forward, and stores nothing.

    Attributes:
        shapes: by layer index.
    """

    def __init__(self):
        super().__init__(layers=[])
        self.shapes: dict[int, KeyValueShape] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """HF's entry: returns the states unchanged."""
        sizes = key_states.shape[1], key_states.shape[3], value_states.shape[3]
        self.shapes[layer_idx] = KeyValueShape(*sizes, key_states.dtype, key_states.device)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing has been stored."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Nothing has been stored."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Called by HF to get mask sizes; the masks that follow from it are only described."""
        return 1, 0
