"""Attention of a window by a kernel that reads each row's filled slots."""

from torch import Tensor

from specdec.kernels.attention.reference import ragged_attention
from specdec.kernels.types import AttentionOptions
from specdec.slots.cache import Chunk, Window
from specdec.slots.visible import first_seen, own_visible


def attend_to_filled(
    window: Window, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> Tensor:
    """`attend` without a mask."""
    num_queries = query.shape[2]
    slots = window.slots[:, -num_queries:].expand(len(query), -1)
    visible = own_visible(window, num_queries, options.sliding_window, options.is_causal)
    positions = None if options.sliding_window is None else window.positions
    if positions is not None:
        positions = positions[:, -num_queries:].expand(len(query), -1)
    if isinstance(chunk := options.sliding_window, Chunk):  # what its last position sees behind
        positions = first_seen(slots if positions is None else positions, chunk)
        positions = positions + chunk.size - 1
        options = options._replace(sliding_window=chunk.size)
    options = options._replace(window_visible=visible, positions=positions)
    return ragged_attention(query, keys, values, slots, options)
