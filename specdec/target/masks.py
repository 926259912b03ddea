"""Which slots each token of a window sees, as the additive mask of a forward.

Legend: B rows, N tokens of a window, n queries (the last of the N), W slots attended over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.target.cache import Window


def sees(queries: Tensor, keys: Tensor, sliding_window: int | None = None) -> Tensor:
    """Whether tokens see others: themselves and those before them, `sliding_window` in all.

    Args:
        queries: int64 positions.
        keys: the same, of a shape that broadcasts against it.
        sliding_window: `None` for full attention.

    Example:
        >>> sees(torch.tensor([[0], [3]]), torch.arange(5), 2).long()
        tensor([[1, 0, 0, 0, 0],
                [0, 0, 1, 1, 0]])
    """
    seen = keys <= queries
    return seen if sliding_window is None else seen & (keys > queries - sliding_window)


def window_mask(
    window: Window, num_queries: int, dtype: torch.dtype, sliding_window: int | None = None
) -> Tensor:
    """The additive mask of a window's last n tokens, made once for all layers that share it.

    A token to forget sees what the last slot sees, since a row without any key would be NaN.

    Args:
        window: on the device of the mask.
        num_queries: n.
        dtype: of the mask, that of the queries.
        sliding_window: of the layer, in positions; `None` for full attention.

    Returns:
        `[B, 1, n, W]`, contiguous: 0 where visible and -inf elsewhere.

    Example:
        >>> window_mask(Window(torch.tensor([[1, 2]]), 4), 2, torch.float32)
        tensor([[[[0., 0., -inf, -inf],
                  [0., 0., 0., -inf]]]])
    """
    key = num_queries, dtype, sliding_window
    if key not in window.masks:
        slots, device = window.slots[:, -num_queries:], window.slots.device
        attended = torch.arange(window.num_attended, device=device)
        queries = slots.clamp(max=window.num_attended - 1)[..., None]
        seen = sees(queries, attended, sliding_window)
        if window.visible is not None or window.positions is not None:
            seen = _visible_slots(window, slots, queries, attended, sliding_window)
        hidden = torch.full(
            (len(slots), 1, *seen.shape[1:]), -torch.inf, dtype=dtype, device=device
        )
        window.masks[key] = hidden.masked_fill_(seen[:, None], 0)
    return window.masks[key]


def own_visible(window: Window, num_queries: int, sliding_window: int | None) -> Tensor | None:
    """`[B, n, m]`: which of the last m slots a window's last n tokens see, as `ragged_attention`
    takes it; `None` for a chain. A sliding window hides slots of this window only.
    """
    if window.positions is None and window.visible is None:
        return None
    slots = window.slots[:, -num_queries:]
    order = torch.arange(num_queries, device=slots.device)
    visible = (order <= order[:, None])[None] if window.visible is None else window.visible
    visible = visible.expand(len(slots), num_queries, -1)
    if sliding_window is None:
        return visible
    queries, keys = slots, slots.amin(dim=1, keepdim=True) + order
    if window.positions is not None:
        queries = keys = window.positions[:, -num_queries:]
    near = keys[:, None] > queries[..., None] - sliding_window
    earlier = visible.shape[2] - num_queries
    return torch.cat([visible[..., :earlier], visible[..., earlier:] & near], dim=2)


def _visible_slots(
    window: Window, slots: Tensor, queries: Tensor, attended: Tensor, sliding_window: int | None
) -> Tensor:
    """`[B, n, W]` bool: what queries at slots `[B, n]` see, in a window that is no chain."""
    num_queries, seen = slots.shape[1], attended <= queries
    if sliding_window is not None:
        at = queries if window.positions is None else window.positions[:, -num_queries:, None]
        seen = seen & (attended > at - sliding_window)  # before a window, position and slot are one
    own = own_visible(window, num_queries, sliding_window)
    count = own.shape[2]
    offsets = attended - slots.amin(dim=1, keepdim=True) + count - num_queries  # [B, W]
    index = offsets.clamp(0, count - 1)[:, None].expand(-1, num_queries, -1)
    own = own.gather(2, index)
    return torch.where(((offsets >= 0) & (offsets < count))[:, None], own, seen)
