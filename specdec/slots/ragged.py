"""Attention of a window by a kernel that reads each row's filled slots."""

from torch import Tensor

from specdec.kernels.attention.reference import ragged_attention, visible_slots
from specdec.kernels.types import AttentionOptions
from specdec.slots.cache import Window
from specdec.slots.spans import Chunk, Near
from specdec.slots.visible import first_seen, own_visible, seen_of


def attend_to_filled(
    window: Window, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> Tensor:
    """`attend` without a mask."""
    slots = window.slots[:, -query.shape[2] :].expand(len(query), -1)
    return ragged_attention(query, keys, values, slots, in_slots(window, slots, options))


def in_slots(window: Window, slots: Tensor, options: AttentionOptions) -> AttentionOptions:
    """The options of a layer as the kernel takes them, for the window's last tokens at `slots`."""
    rows, num_queries = slots.shape
    near, num_first = seen_of(window, options.sliding_window), None
    visible = own_visible(window, num_queries, near, options.is_causal)
    positions = None if near is None else window.positions
    if positions is not None:
        positions = positions[:, -num_queries:].expand(rows, -1)
    if isinstance(near, Chunk):  # what its last position sees behind
        positions = first_seen(slots if positions is None else positions, near)
        positions, near = positions + near.size - 1, near.size
    if isinstance(near, Near):
        near, num_first = near.recent, near.sinks or None
    options = options._replace(window_visible=visible, positions=positions)
    return options._replace(sliding_window=near, num_first=num_first)


def seen_in_slots(
    window: Window, slots: Tensor, sliding_window: int | Chunk | Near | None, is_causal: bool
) -> Tensor:
    """`[B, n, W]` bool: what the window's last tokens at `slots` `[B, n]` see, by the kernel's own
    definition.
    """
    layer = AttentionOptions(sliding_window=sliding_window, is_causal=is_causal)
    return visible_slots(slots, window.num_attended, in_slots(window, slots, layer))
