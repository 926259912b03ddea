"""`SlotCache`: keys and values in preallocated slots, one length per row.

A committed token at position p of its row lives in slot p. Rows therefore start at slot 0 whatever
the padding of the input was, a row forgets by shortening its length, and ragged acceptance is the
normal case. Slots at or beyond a row's length hold garbage that the attention mask hides until it
is overwritten; within a row nothing is zeroed, and nothing moves but the accepted path of a tree
(`follow`). The cache does not know the rows' lengths: the slots of a window's tokens are arguments
of the window.

Legend: B rows, N tokens of a window, S slots.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from specdec.graphs.tree import shared, tables
from specdec.slots.layout import (
    Indexer,
    KeyValueShape,
    Places,
    Stored,
    allocate,
    by_layer,
    lines_and_heads,
    row_starts,
)

if TYPE_CHECKING:
    from specdec.slots.spans import Chunk, Near

LAST = "last_embedding"
"""Name of the row input that holds the embedding of a prompt's last token, where it is not that of
its id."""
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


class Window:
    """The tokens of one forward: where each is stored, where it stands, and what it sees.

    A slot is an index in the storage, a position one in the text. Committed tokens have
    slot = position, and so has a chain of draft tokens. Nodes of a tree are stored one after the
    other, and nodes of one depth share a position. What a model is told is `text_positions`: a row
    may carry an offset. What sees what is a matter of slots, and of positions without it.

    Args:
        slots: `[B, N]` int64; the cache's padding slot for a token to forget.
        num_attended: W, how many slots the forward attends over, a multiple of `SLOT_MULTIPLE`.
        positions: `[B, N]` int64; `None` for those of a chain, `slots`. Positions of their own are
            those of tokens in consecutive slots.
        visible: bool that broadcasts to `[B, n, m]`, over the n tokens of the window that have
            queries, its last, and the last m >= n slots that are in use with it. Entry (i, j) is
            whether token i sees slot `first + j`, where `first` is m - n before the smallest slot
            of a row's queries: the ancestors of a node and itself, or a block that sees itself in
            both directions. Slots before `first` are seen by all. `None` is causal.
        layer_windows: sliding window of each attention layer by its index, in positions, or its
            `Chunk`; `None` for full attention, also of layers that are left out.
        query_layers: layers whose queries are wanted as features.
        row_inputs: `[B, ...]` by name, those of the cache; see `SlotCache`.
        logits_to_keep: logits of the last so many tokens are computed; 0 for all of them; `None`
            where nobody reads them: as few as the model can.
        is_chunk: of a prompt: many tokens, all of which are kept.
        memory: what recurrent layers remember of the rows; `None` where there are none.
        has_kernels: attention over the window may be `ragged_attention`.
        near: all that any layer sees, of the cache; `None` for no such bound.
        prompt: what the text decoder reads in place of token ids, a chunk of `PromptInputs`.

    Attributes:
        masks: additive masks of this forward, made on first use (attention.py).
        features: hidden states of this forward by feature layer, where they are wanted.
    """

    def __init__(
        self,
        slots: Tensor,
        num_attended: int,
        *,
        positions: Tensor | None = None,
        visible: Tensor | None = None,
        layer_windows: Mapping[int, int | Chunk | None] | None = None,
        query_layers: Collection[int] = (),
        row_inputs: Mapping[str, Tensor] | None = None,
        logits_to_keep: int | None = 0,
        is_chunk: bool = False,
        memory: Any = None,
        has_kernels: bool = False,
        near: Near | None = None,
        prompt: Any = None,
    ):
        self.prompt, self.near = prompt, near
        self.slots, self.num_attended = slots, num_attended
        self.positions, self.visible, self.row_inputs = positions, visible, row_inputs or {}
        self.layer_windows, self.has_kernels = layer_windows or {}, has_kernels
        self.query_layers = query_layers
        self.logits_to_keep, self.is_chunk, self.memory = logits_to_keep, is_chunk, memory
        self.masks: dict[tuple, Tensor] = {}
        self.features: dict[Any, Tensor] = {}
        self.flat_slots: Tensor | None = None  # in a list of the slots of all rows
        self._elsewhere: dict[torch.device, Window] = {}

    @property
    def text_positions(self) -> Tensor:
        """`[B, N]`, where each token stands in its text, for a model."""
        positions = self.slots if self.positions is None else self.positions
        offset = self.row_inputs.get("position_offset")
        return positions if offset is None else positions + offset[:, None]

    def positions_below(self, limit: int | None, padding_slot: int) -> Tensor:
        """The same for a model of so many positions. Tokens at or beyond the last one will be
        forgotten: those in the padding slot, and what a row drafts beyond its last token.
        """
        positions = self.text_positions
        has_offset = "position_offset" in self.row_inputs
        fits = limit is None or (padding_slot < limit and not has_offset)
        return positions if fits else positions.clamp(max=limit - 1)

    @property
    def has_own_masks(self) -> bool:
        """Its prompt says what each token sees, and not the slots."""
        return self.prompt is not None and not self.prompt.is_causal

    @property
    def since_prompt(self) -> Tensor:
        """`[B, N]`, how many positions after the last token of its row's prompt each token stands:
        0 for that token, from which the first new one is predicted, and below 0 before it.

        Raises:
            ValueError: nobody said where prompts end.
        """
        if "prompt_end" not in self.row_inputs:
            raise ValueError(
                "a window has no row_inputs['prompt_end'], the position of the last token of each "
                "row's prompt; in a loop of your own, set cache.row_inputs['prompt_end']"
            )
        return self.text_positions - self.row_inputs["prompt_end"][:, None]

    def on(self, device: torch.device) -> Window:
        """The window with its tensors on a device, that of some layers, copied there once."""
        if device == self.slots.device:
            return self
        if device not in self._elsewhere:
            other = self._elsewhere[device] = copy.copy(self)
            for name in ("slots", "positions", "visible"):
                tensor = getattr(self, name)
                setattr(other, name, None if tensor is None else tensor.to(device))
            other.row_inputs = {name: own.to(device) for name, own in self.row_inputs.items()}
            other.masks, other.flat_slots = {}, None
        return self._elsewhere[device]


def has_kernels(devices: Iterable[torch.device]) -> bool:
    """Whether windows over storage on these devices are written and attended to by kernels."""
    return any(device.type == "cuda" for device in devices)


@dataclass(init=False, eq=False, repr=False)
class SlotCache(Cache):
    """Static key/value storage for B rows of S slots, written in place, that an HF model sees as
    its cache.

    Args:
        batch_size: rows B.
        num_slots: slots of each row: the longest sequence plus one window; rounded up to a multiple
            of `SLOT_MULTIPLE`.
        shapes: what each layer stores, by layer index, and what else is stored of a token, by
            `Indexer` or `Compressor`.
        extra_slots: how many of these slots the windows of a step may use beyond those of the text
            and of K tokens after it. `None` where nobody knows: then `in_use` is always S.

    Attributes:
        in_use: forwards attend over the first so many slots, a multiple of `SLOT_MULTIPLE`. It is S
            but inside of `narrowed`.
        near: what of a text its tokens see, in all layers; `None` for all.
        row_inputs: what windows say of each row, by name, `[B, ...]`. `"position_offset"`, int64:
            how much further on its tokens stand in its text than their slots say. `"prompt_end"`,
            int64: the position of the last token of its prompt, for edits. `"adapter"`, int64: of
            `Target.adapter_indices`; without it adapters are those that are active. And what calls
            bring for edits and drafters.
        keys: by layer or `Indexer` `[B, S + 1, heads, key_width]`.
        values: likewise `[B, S + 1, heads, value_width]`.
        stores: one tensor for all keys and values of one shape, `[B, n, S + 1, heads, width]`, of
            which they are views.
        padding_slot: the last slot, never attended to, where tokens go that must not be remembered.

    Example:
        >>> shape = KeyValueShape(2, 8, 8, torch.float32, torch.device("cpu"))
        >>> cache = SlotCache(batch_size=3, num_slots=50, shapes={0: shape, 1: shape})
        >>> cache.num_slots, cache.keys[1].shape
        (64, torch.Size([3, 65, 2, 8]))
    """

    stores: list[Tensor]
    row_inputs: dict[str, Tensor]
    num_slots: int = shared()
    extra_slots: int | None = shared()
    near: Near | None = shared()
    _places: Places = shared()

    def __init__(
        self,
        batch_size: int,
        num_slots: int,
        shapes: Mapping[Stored, KeyValueShape],
        *,
        extra_slots: int | None = None,
    ):
        self.extra_slots, self.row_inputs, self.near = extra_slots, {}, None
        self.num_slots = round_up(num_slots)
        self._places, self.stores = allocate(batch_size, self.num_slots, shapes)
        self.__post_init__()

    def __post_init__(self):
        """What follows from the tensors: keys and values by layer, and the two readings of a
        layer's storage, one line per slot to write, by head to attend.
        """
        super().__init__(layers=[])
        self.padding_slot, self.window = self.num_slots, None
        self.in_use = self.num_slots
        self.num_rows = next((len(table) for table in tables(self).values()), 0)
        self.row_starts = row_starts(self.stores)
        self.keys, self.values = by_layer(self._places, self.stores)
        self.has_kernels = has_kernels(self.row_starts)
        self._views = {
            layer: lines_and_heads(keys, self.values[layer]) for layer, keys in self.keys.items()
        }

    def open_window(self, slots: Tensor, *, is_chunk: bool = False, **options: Any) -> Window:
        """Names the slots of the next forward; called before each one.

        This is also where a cache deals with what was rejected since its last window: everything at
        or after a row's first slot. For slots there is nothing to do, since no token sees them
        before they are overwritten.

        Args:
            slots: see `Window`.
            is_chunk: of a prompt: everything is kept.
            options: the others of `Window`.

        Returns:
            The window to hand to the model call.
        """
        own = {name: getattr(self, name) for name in ("has_kernels", "row_inputs", "near")}
        self.window = Window(slots, self.in_use, is_chunk=is_chunk, **{**own, **options})
        return self.window

    def check_rows(self, tokens: Tensor) -> None:
        """Raises `ValueError` for tokens `[B, N]` of another number of rows."""
        if len(tokens) != self.num_rows:
            raise ValueError(f"the cache has {self.num_rows} rows, got tokens of {len(tokens)}")

    def follow(self, start: Tensor, path: Tensor) -> None:
        """Moves what the accepted path of a tree has stored to the slots of a chain, in place, in
        all layers at once: the accepted nodes become slots `start + 1`, `start + 2`, ....

        Args:
            start: `[B]` slot of the root.
            path: `[B, D + 1]` rows of the window, 0 and then the accepted nodes, in ascending
                order; after them anything in the window.
        """
        from specdec.slots.path import follow

        follow(self.stores, self.row_starts, start, path)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """HF's entry: writes `[B, heads, N, width]` states at the window's slots, returns
        `[B, heads, num_attended, width]` views.
        """
        key_lines, value_lines, keys, values = self._views[layer_idx]
        # Under autocast keys can be wider than values; both are stored as the wider one.
        key_states, value_states = key_states.to(keys.dtype), value_states.to(values.dtype)
        window, attended = self.window, self.window.num_attended
        if window.slots.device != keys.device:
            window = window.on(keys.device)
        if self.has_kernels:
            from specdec.kernels.slots.reference import write_slots, writes_slots
        if self.has_kernels and writes_slots(key_states, keys):
            storage = self.keys[layer_idx], self.values[layer_idx]
            write_slots(*storage, key_states, value_states, window.slots)
        elif self.num_rows == 1:  # with one row, slots need no row offset
            slots = window.slots.squeeze(0)
            keys.index_copy_(2, slots, key_states)
            values.index_copy_(2, slots, value_states)
        else:
            if window.flat_slots is None:
                window.flat_slots = (window.slots + self.row_starts[keys.device]).flatten()
            for lines, states in ((key_lines, key_states), (value_lines, value_states)):
                lines.index_copy_(0, window.flat_slots, states.transpose(1, 2).flatten(0, 1))
        return keys.narrow(2, 0, attended), values.narrow(2, 0, attended)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """HF's entry: writes `[B, N, width]` keys of a layer's indexer at the window's slots,
        returns a `[B, num_attended, width]` view.
        """
        return self.write(Indexer(layer_idx), indexer_key_states)

    def write(self, stored: Stored, states: Tensor, slots: Tensor | None = None) -> Tensor:
        """Writes `[B, N, width]` states of a table of one head without values at slots `[B, N]`,
        those of the window; returns a `[B, num_attended, width]` view.
        """
        lines, _, keys, _ = self._views[stored]
        window, starts = self.window.on(keys.device), self.row_starts[keys.device]
        if slots is None and window.flat_slots is None:
            window.flat_slots = (window.slots + starts).flatten()
        lines_of = window.flat_slots if slots is None else (slots + starts).flatten()
        lines.index_copy_(0, lines_of, states.to(keys.dtype).flatten(0, 1)[:, None])
        return keys[:, 0].narrow(1, 0, window.num_attended)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Called by HF to get a length; positions are always passed, so a bound is enough."""
        return self.window.num_attended

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Called by HF to get mask sizes: (slots attended over, offset)."""
        return self.window.num_attended, 0


@contextmanager
def narrowed(caches: Iterable[SlotCache], in_use: int) -> Iterator[None]:
    """Lets caches attend over their first slots only, which on a CPU is faster.

    The loop knows the rows' lengths, so it narrows caches for one step or one chunk of a prompt.
    After that caches attend over all of their slots again, also after an error: a part that is
    called by hand needs no number, and attends over all that it could need.

    Args:
        caches: those without `extra_slots` stay as they are.
        in_use: an upper bound of the slots that hold text, or tokens that are run after it.

    Example:
        >>> cache = SlotCache(batch_size=1, num_slots=64, shapes={}, extra_slots=8)
        >>> with narrowed([cache], 20):
        ...     print(cache.in_use)
        32
        >>> cache.in_use
        64
    """
    caches = [cache for cache in caches if cache.extra_slots is not None]
    try:
        for cache in caches:
            cache.in_use = min(round_up(in_use + cache.extra_slots), cache.num_slots)
        yield
    finally:
        for cache in caches:
            cache.in_use = cache.num_slots
