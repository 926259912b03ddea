"""`ragged_attention`: the definition, in plain PyTorch.

Legend: B rows, N queries per row, S slots, Hq query heads, Hkv key and value heads, D width of
keys, Dv width of values.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_WINDOW = 64
"""Queries of a window with a mask of its own: a kernel holds a row of the mask in one integer."""


class AttentionOptions(NamedTuple):
    """How scores become weights, and who sees whom.

    Args:
        scale: factor of the scores; `None` is `D ** -0.5`.
        softcap: scores become `softcap * tanh(scores / softcap)`; `None` leaves them.
        sinks: `[Hq]`, one extra score per head that takes weight and has no value; `None` for none.
        sliding_window: a query in slot q sees slots after `q - sliding_window`; `None` sees all.
        window_visible: `[B, N, N]` bool. Entry (i, j) is whether query i sees slot `first + j`,
            where `first` is the row's smallest query slot: the ancestors of a tree's nodes, or a
            block that sees itself in both directions. It is all that counts for these slots, also
            beside a sliding window. `None` is causal.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    sliding_window: int | None = None
    window_visible: Tensor | None = None


CAUSAL = AttentionOptions()
"""Plain causal attention."""


def ragged_attention(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, options: AttentionOptions = CAUSAL
) -> Tensor:
    """Attention of a few queries per row over the slots that the row has filled.

    A row's length is its largest query slot plus 1: what lies at or beyond it may be anything, NaN
    too, and changes nothing. On a GPU time and memory traffic follow the lengths, not the number of
    slots.

    Args:
        query: `[B, Hq, N, D]`.
        keys: `[B, Hkv, S, D]`, any strides; head h of the queries reads head `h // (Hq / Hkv)`.
        values: `[B, Hkv, S, Dv]`.
        slots: `[B, N]` int64, the slot of each query. A query at or beyond S (a token to forget)
            sees nothing, and its result is 0.
        options: scores, weights and visibility.

    Returns:
        `[B, N, Hq, Dv]` of the dtype of `query`; computed in float32, or in float64 if that is it.

    Raises:
        ValueError: a `window_visible` for more than `MAX_WINDOW` queries, on a GPU.

    Example:
        >>> states = torch.zeros(1, 1, 4, 2)
        >>> values = torch.tensor([1.0, 3.0, 8.0, torch.nan]).view(1, 1, 4, 1)
        >>> slots = torch.tensor([[0, 1, 2, 4]])
        >>> ragged_attention(states, states, values, slots).flatten().tolist()
        [1.0, 2.0, 4.0, 0.0]
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    seen = visible_slots(slots, keys.shape[2], options)[:, None]  # [B, 1, N, S]
    is_filled = _is_filled(slots, keys.shape[2])[:, None, :, None]  # [B, 1, S, 1]
    group = query.shape[1] // keys.shape[1]
    keys, values = (
        torch.where(is_filled, states.to(wide), 0.0).repeat_interleave(group, dim=1)
        for states in (keys, values)
    )
    scores = query.to(wide) @ keys.transpose(-1, -2) * scale  # [B, Hq, N, S]
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    largest = scores.amax(dim=-1, keepdim=True)
    if options.sinks is not None:
        sinks = options.sinks.to(wide)[:, None, None]
        largest = torch.maximum(largest, sinks)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)  # a query that sees nothing
    weights = torch.exp(scores - largest)
    total = weights.sum(dim=-1, keepdim=True)
    if options.sinks is not None:
        total = total + torch.exp(sinks - largest)
    total = total.masked_fill(total == 0, 1.0)
    return (weights @ values / total).transpose(1, 2).to(query.dtype)


def visible_slots(slots: Tensor, num_slots: int, options: AttentionOptions) -> Tensor:
    """`[B, N, S]` bool: the slots that each query of `ragged_attention` sees."""
    all_slots = torch.arange(num_slots, device=slots.device)
    is_real = slots < num_slots
    query_slots = torch.where(is_real, slots, -1)[..., None]
    seen = all_slots <= query_slots
    if options.sliding_window is not None:
        seen &= all_slots > query_slots - options.sliding_window
    if options.window_visible is None:
        return seen
    offsets = all_slots - slots.amin(dim=1, keepdim=True)  # [B, S]
    last = slots.shape[1] - 1
    index = offsets.clamp(0, last)[:, None].expand(-1, slots.shape[1], -1)
    own = options.window_visible.gather(2, index) & (offsets <= last)[:, None] & is_real[..., None]
    own &= _is_filled(slots, num_slots)[:, None]
    return torch.where((offsets >= 0)[:, None], own, seen)


def _is_filled(slots: Tensor, num_slots: int) -> Tensor:
    """`[B, S]` bool: slots before each row's length."""
    lengths = torch.where(slots < num_slots, slots + 1, 0).amax(dim=1, keepdim=True)
    return torch.arange(num_slots, device=slots.device) < lengths
