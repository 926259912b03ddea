"""`SlotCache`: keys and values in preallocated slots, one length per row.

A token at position p of its row lives in slot p. Rows therefore start at slot 0 whatever the
padding of the input was, a row forgets by shortening its length, and ragged acceptance is the
normal case. Slots at or beyond a row's length hold garbage that the attention mask hides until it
is overwritten; within a row nothing is ever moved or zeroed.
"""

import copy

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from specdec.types import keep_rows


class Window:
    """Where the tokens of one forward sit.

    Args:
        slots: `[B, N]` int64, the slot (= position) of each token; the cache's `trash` slot for a
            token to forget.
        num_slots: how many slots the forward attends over, known to the host.
        audit: sliding window that each attention layer asks for, by layer, when somebody wants to
            know; else `None`.

    Attributes:
        masks: additive masks of this forward, filled on first use (attention.py).
    """

    __slots__ = ("audit", "masks", "num_slots", "slots")

    def __init__(self, slots: Tensor, num_slots: int, audit: dict[int, int | None] | None = None):
        self.slots = slots
        self.num_slots = num_slots
        self.audit = audit
        self.masks: dict[tuple, Tensor] = {}


class SlotCache(Cache):
    """Static key/value storage for B rows of S slots, written in place, that an HF model sees as
    its cache.

    Storage is allocated at the first forward (only then are the number of layers, heads and widths
    known) and never again. `lengths` says how many slots of each row are real.

    Args:
        batch_size: rows B.
        num_slots: slots S of each row: the longest sequence plus one window.
        device: where `lengths` lives; keys and values follow the model's layers.

    Example:
        >>> cache = SlotCache(batch_size=2, num_slots=64)
        >>> cache.lengths
        tensor([0, 0])
    """

    def __init__(self, batch_size: int, num_slots: int, *, device: torch.device | str = "cpu"):
        super().__init__(layers=[])
        self.num_rows = batch_size
        self.num_slots = num_slots
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.keys: dict[int, Tensor] = {}  # by layer: [B, S + 1, H, D]
        self.values: dict[int, Tensor] = {}
        self._views: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._window: Window | None = None
        self.offsets = torch.arange(num_slots, device=device)
        self._row_offsets = torch.arange(batch_size, device=device)[:, None] * (num_slots + 1)

    @property
    def trash(self) -> int:
        """The one extra slot, never attended to, where tokens go that must not be remembered."""
        return self.num_slots

    @property
    def size_bytes(self) -> int:
        """Bytes held by keys and values."""
        return sum(buffer.nbytes for buffer in self._buffers())

    def open_window(self, slots: Tensor, *, reach: int) -> Window:
        """Names the slots of the next forward.

        Args:
            slots: `[B, N]` int64.
            reach: host upper bound of the slots that the forward needs (largest real slot + 1).

        Returns:
            The window to hand to the model call.
        """
        self._window = Window(slots, min(reach, self.num_slots))
        one_row = self.num_rows == 1
        self._flat_slots = slots.squeeze(0) if one_row else (slots + self._row_offsets).flatten()
        return self._window

    def reset(self) -> None:
        """Empties the cache and keeps its storage, so that a later call of equal size allocates
        nothing.
        """
        for buffer in self._buffers():
            buffer.zero_()  # dead slots are masked with weight 0, and 0 * NaN would still be NaN
        self.lengths.zero_()

    def keep(self, rows: list[int]) -> "SlotCache":
        """A cache of the given rows in this one's storage, of which only `reset` may be used from
        then on; see `keep_rows`.
        """
        kept = copy.copy(self)
        kept.num_rows = len(rows)
        kept.lengths = keep_rows(self.lengths, rows)
        kept.keys = {i: keep_rows(keys, rows) for i, keys in self.keys.items()}
        kept.values = {i: keep_rows(values, rows) for i, values in self.values.items()}
        kept._row_offsets = self._row_offsets[: len(rows)]
        kept._views = {}
        for layer_idx in kept.keys:
            kept._make_views(layer_idx)
        return kept

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """HF's entry: writes `[B, H, N, D]` states at the window's slots, returns `[B, H,
        num_slots, D]` views.
        """
        if layer_idx not in self.keys:
            self._allocate(layer_idx, key_states, value_states)
        keys, values = self._views[layer_idx]
        return self._write(*keys, key_states), self._write(*values, value_states)

    def _write(self, by_slot: Tensor, by_head: Tensor, states: Tensor) -> Tensor:
        slots = self._flat_slots
        if slots.device != by_slot.device:
            slots = slots.to(by_slot.device)
        if self.num_rows == 1:  # one row's slots are everybody's: no need to bring them together
            by_head.index_copy_(2, slots, states)
        else:
            by_slot.index_copy_(0, slots, states.transpose(1, 2).flatten(0, 1))
        return by_head.narrow(2, 0, self._window.num_slots)

    def _buffers(self) -> tuple[Tensor, ...]:
        return (*self.keys.values(), *self.values.values())

    def _allocate(self, layer_idx: int, key_states: Tensor, value_states: Tensor) -> None:
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            _, heads, _, width = states.shape
            store[layer_idx] = states.new_zeros(self.num_rows, self.num_slots + 1, heads, width)
        self._make_views(layer_idx)

    def _make_views(self, layer_idx: int) -> None:
        """The two readings of a layer's storage: one line per slot to write, by head to attend."""
        self._views[layer_idx] = [
            (buffer.flatten(0, 1), buffer.transpose(1, 2))
            for buffer in (self.keys[layer_idx], self.values[layer_idx])
        ]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """HF's question for a length; positions are always passed, so a bound is enough."""
        return self._window.num_slots

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """HF's question for mask sizes: (slots attended over, offset)."""
        return self._window.num_slots, 0
