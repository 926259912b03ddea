"""Attention of a window over slots: on a GPU, where the queries are few, by a kernel; else with a
dense mask.

Legend: B rows, N tokens of a window, n queries (the last of the N), W slots attended over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.types import AttentionOptions
from specdec.slots.cache import Window

if TYPE_CHECKING:
    from specdec.slots.spans import Chunk, Near


def attend(
    window: Window,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    options: AttentionOptions,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention of a window over slots: on a GPU, where the queries are few, by a kernel that reads
    each row's filled slots; else with a dense mask.

    Args:
        window: whose last N tokens the queries are of.
        query: `[B, Hq, N, D]`.
        keys: `[B, Hkv, S', D]`, slots of the cache.
        values: `[B, Hkv, S', Dv]`.
        options: how scores become weights, and the layer's sliding window or `Chunk`.
        mask: additive `[B, 1, N, S']`, in place of that of the window.

    Returns:
        `[B, N, Hq, Dv]`.
    """
    num_queries = query.shape[2]
    if window.slots.device != query.device:
        window = window.on(query.device)
    if mask is None and window.has_kernels and _attends_raggedly(window, query, keys):
        from specdec.slots.ragged import attend_to_filled

        return attend_to_filled(window, query, keys, values, options)
    if mask is None:
        layer = options.sliding_window, options.is_causal
        mask = window_mask(window, num_queries, query.dtype, *layer)
    mask = mask.to(query.dtype)
    if options.softcap is None and options.sinks is None:
        is_grouped = query.shape[1] != keys.shape[1]
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=options.scale, enable_gqa=is_grouped
        )
        return out.transpose(1, 2)
    from specdec.slots.weights import attend_by_weights

    return attend_by_weights(query, keys, values, mask, options)


def _attends_raggedly(window: Window, query: Tensor, keys: Tensor) -> bool:
    from specdec.kernels.attention.reference import attends_raggedly

    has_mask = window.visible is not None or window.positions is not None
    return attends_raggedly(query, keys, has_window_mask=has_mask)


def sees(queries: Tensor, keys: Tensor, sliding_window: int | Chunk | Near | None = None) -> Tensor:
    """Whether tokens see others: themselves and those before them, `sliding_window` in all, or
    those of their `Chunk`, or `Near` ones.

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
    if sliding_window is None:
        return seen
    from specdec.slots.visible import is_near

    return seen & is_near(queries, keys, sliding_window)


def window_mask(
    window: Window,
    num_queries: int,
    dtype: torch.dtype,
    sliding_window: int | Chunk | None = None,
    is_causal: bool = False,
) -> Tensor:
    """The additive mask of a window's last n tokens, made once for all layers that share it.

    A token to forget sees what the last slot sees, since a row without any key would be NaN.

    Args:
        window: on the device of the mask.
        num_queries: n.
        dtype: of the mask, that of the queries.
        sliding_window: of the layer, in positions, or its `Chunk`; `None` for full attention.
        is_causal: of the layer, whatever `window.visible` says.

    Returns:
        `[B, 1, n, W]`, contiguous: 0 where visible and -inf elsewhere.

    Example:
        >>> window_mask(Window(torch.tensor([[1, 2]]), 4), 2, torch.float32)
        tensor([[[[0., 0., -inf, -inf],
                  [0., 0., 0., -inf]]]])
    """
    if window.near is not None:
        from specdec.slots.visible import seen_of

        sliding_window = seen_of(window, sliding_window)
    key = num_queries, dtype, sliding_window, is_causal
    if key not in window.masks:
        slots, device = window.slots[:, -num_queries:], window.slots.device
        attended = torch.arange(window.num_attended, device=device)
        slots = slots.clamp(max=window.num_attended - 1)
        if window.positions is not None or (window.visible is not None and not is_causal):
            from specdec.slots.ragged import seen_in_slots

            seen = seen_in_slots(window, slots, sliding_window, is_causal)
        else:
            seen = sees(slots[..., None], attended, sliding_window)
        hidden = torch.full(
            (len(slots), 1, *seen.shape[1:]), -torch.inf, dtype=dtype, device=device
        )
        window.masks[key] = hidden.masked_fill_(seen[:, None], 0)
    return window.masks[key]


def seen_mask(window: Window, num_queries: int) -> Tensor:
    """`window_mask` of full attention as booleans, made once for all layers: what is left out by it
    may have any value, NaN among them.
    """
    key = num_queries, torch.bool
    if key not in window.masks:
        window.masks[key] = window_mask(window, num_queries, torch.float32) == 0
    return window.masks[key]
