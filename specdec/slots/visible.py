"""What tokens of a window see that is no chain, or of layers with windows of their own.

Legend: B rows, N tokens of a window, n queries (the last of the N), W slots attended over.
"""

import torch
from torch import Tensor

from specdec.slots.cache import Window
from specdec.slots.spans import Chunk, Near


def seen_of(window: Window, sliding_window: int | Chunk | Near | None) -> int | Chunk | Near | None:
    """The sliding window of a layer in a text of which only `window.near` is seen: that, where the
    layer has none; else as many of its last positions.
    """
    near = window.near
    if near is None or isinstance(sliding_window, Near):
        return sliding_window
    return near if sliding_window is None else min(sliding_window, sum(near))


def first_seen(queries: Tensor, sliding_window: int | Chunk) -> Tensor:
    """The first position that queries at given positions see."""
    if isinstance(sliding_window, Chunk):
        return queries - queries % sliding_window.size
    return queries - sliding_window + 1


def is_near(queries: Tensor, keys: Tensor, sliding_window: int | Chunk | Near) -> Tensor:
    """Whether queries see keys, of positions that broadcast, which are not after them."""
    if isinstance(sliding_window, Near):
        return (keys >= first_seen(queries, sliding_window.recent)) | (keys < sliding_window.sinks)
    return keys >= first_seen(queries, sliding_window)


def own_visible(
    window: Window,
    num_queries: int,
    sliding_window: int | Chunk | Near | None,
    is_causal: bool = False,
) -> Tensor | None:
    """`[B, n, m]`: which of the last m slots a window's last n tokens see, as `ragged_attention`
    takes it; `None` for a chain. A sliding window hides slots of this window only. A causal layer
    sees what a chain does.
    """
    if window.positions is None and (window.visible is None or is_causal):
        return None
    slots = window.slots[:, -num_queries:]
    order = torch.arange(num_queries, device=slots.device)
    is_chain = window.visible is None or is_causal
    visible = (order <= order[:, None])[None] if is_chain else window.visible
    visible = visible.expand(len(slots), num_queries, -1)
    if sliding_window is None:
        return visible
    queries, keys = slots, slots.amin(dim=1, keepdim=True) + order
    if window.positions is not None:
        queries = keys = window.positions[:, -num_queries:]
    near = is_near(queries[..., None], keys[:, None], sliding_window)
    earlier = visible.shape[2] - num_queries
    return torch.cat([visible[..., :earlier], visible[..., earlier:] & near], dim=2)
