"""Attention of a window over slots: on a GPU, where the queries are few, by a kernel; else with a
dense mask.

Legend: B rows, N tokens of a window, n queries (the last of the N), W slots attended over.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.attention.reference import attends_raggedly, ragged_attention
from specdec.kernels.types import AttentionOptions
from specdec.slots.cache import Chunk, Window


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
    scale, softcap, sinks, sliding_window, *_, is_causal = options
    if mask is None:
        mask = window_mask(window, num_queries, query.dtype, sliding_window, is_causal)
    mask = mask.to(query.dtype)
    if softcap is None and sinks is None:
        is_grouped = query.shape[1] != keys.shape[1]
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scale, enable_gqa=is_grouped
        )
        return out.transpose(1, 2)

    groups = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask  # [B, Hq, N, S']
    if sinks is not None:
        sinks = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    wide = torch.promote_types(torch.float32, query.dtype)
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    return (weights[..., : values.shape[2]] @ values).transpose(1, 2)


def _attends_raggedly(window: Window, query: Tensor, keys: Tensor) -> bool:
    has_mask = window.visible is not None or window.positions is not None
    return attends_raggedly(query, keys, has_window_mask=has_mask)


def first_seen(queries: Tensor, sliding_window: int | Chunk) -> Tensor:
    """The first position that queries at given positions see."""
    if isinstance(sliding_window, Chunk):
        return queries - queries % sliding_window.size
    return queries - sliding_window + 1


def sees(queries: Tensor, keys: Tensor, sliding_window: int | Chunk | None = None) -> Tensor:
    """Whether tokens see others: themselves and those before them, `sliding_window` in all, or
    those of their `Chunk`.

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
    return seen if sliding_window is None else seen & (keys >= first_seen(queries, sliding_window))


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
    key = num_queries, dtype, sliding_window, is_causal
    if key not in window.masks:
        slots, device = window.slots[:, -num_queries:], window.slots.device
        attended = torch.arange(window.num_attended, device=device)
        queries = slots.clamp(max=window.num_attended - 1)[..., None]
        seen = sees(queries, attended, sliding_window)
        own = own_visible(window, num_queries, sliding_window, is_causal)
        if own is not None:
            seen = _visible_slots(window, slots, queries, attended, sliding_window, own)
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


def own_visible(
    window: Window, num_queries: int, sliding_window: int | Chunk | None, is_causal: bool = False
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
    near = keys[:, None] >= first_seen(queries, sliding_window)[..., None]
    earlier = visible.shape[2] - num_queries
    return torch.cat([visible[..., :earlier], visible[..., earlier:] & near], dim=2)


def _visible_slots(
    window: Window,
    slots: Tensor,
    queries: Tensor,
    attended: Tensor,
    sliding_window: int | Chunk | None,
    own: Tensor,
) -> Tensor:
    """`[B, n, W]` bool: what queries at slots `[B, n]` see, of `own_visible` slots and others."""
    num_queries, seen = slots.shape[1], attended <= queries
    if sliding_window is not None:
        at = queries if window.positions is None else window.positions[:, -num_queries:, None]
        # Before a window, position and slot are one.
        seen = seen & (attended >= first_seen(at, sliding_window))
    count = own.shape[2]
    offsets = attended - slots.amin(dim=1, keepdim=True) + count - num_queries  # [B, W]
    index = offsets.clamp(0, count - 1)[:, None].expand(-1, num_queries, -1)
    own = own.gather(2, index)
    return torch.where(((offsets >= 0) & (offsets < count))[:, None], own, seen)
