"""Attention: a few queries per row over the slots that the row has filled. See README.md.

Legend: B rows, N queries per row, S slots, Hq query heads, Hkv key and value heads, D width of
keys, Dv width of values.
"""

import torch
from torch import Tensor

from specdec.kernels.types import CAUSAL, AttentionOptions, suits_kernels

MAX_WINDOW = 256
"""Queries of a window with a mask of its own that attends raggedly."""
MAX_ROWS = 512
"""Query rows (queries times query heads per head of keys) of a window that attends raggedly. Longer
windows, chunks of a prompt, have the arithmetic that makes up for a dense mask.
"""


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

    Example:
        >>> states = torch.zeros(1, 1, 4, 2)
        >>> values = torch.tensor([1.0, 3.0, 8.0, torch.nan]).view(1, 1, 4, 1)
        >>> slots = torch.tensor([[0, 1, 2, 4]])
        >>> ragged_attention(states, states, values, slots).flatten().tolist()
        [1.0, 2.0, 4.0, 0.0]
    """
    if query.is_cuda and suits_kernels(query):
        from specdec.kernels.attention import triton

        return triton.ragged_attention(query, keys, values, slots, options)
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


def attends_raggedly(query: Tensor, keys: Tensor, *, has_window_mask: bool = False) -> bool:
    """Whether `ragged_attention` is the way to attend here: it has a kernel, and the queries are
    few. Elsewhere attention with a dense mask is faster than the definition.

    Args:
        query: `[B, Hq, N, D]`.
        keys: `[B, Hkv, S, D]`.
        has_window_mask: whether the window has a mask of its own.
    """
    if not query.is_cuda or not suits_kernels(query) or query.dtype != keys.dtype:
        return False
    _, num_heads, num_queries, _ = query.shape
    if has_window_mask:
        return num_queries <= MAX_WINDOW
    return num_queries * num_heads // keys.shape[1] <= MAX_ROWS


def visible_slots(slots: Tensor, num_slots: int, options: AttentionOptions) -> Tensor:
    """`[B, N, S]` bool: the slots that each query of `ragged_attention` sees."""
    all_slots = torch.arange(num_slots, device=slots.device)
    is_real = slots < num_slots
    query_slots = torch.where(is_real, slots, -1)[..., None]
    seen = all_slots <= query_slots
    if options.sliding_window is not None:
        positions = query_slots if options.positions is None else options.positions[..., None]
        near = all_slots > positions - options.sliding_window
        if options.num_first is not None:
            near |= all_slots < options.num_first
        seen = seen & near
    if options.window_visible is None:
        return seen
    last = options.window_visible.shape[2] - 1
    earlier = last + 1 - slots.shape[1]
    offsets = all_slots - slots.amin(dim=1, keepdim=True) + earlier  # [B, S]
    index = offsets.clamp(0, last)[:, None].expand(-1, slots.shape[1], -1)
    own = options.window_visible.gather(2, index) & (offsets <= last)[:, None] & is_real[..., None]
    own &= _is_filled(slots, num_slots)[:, None]
    return torch.where((offsets >= 0)[:, None], own, seen)


def _is_filled(slots: Tensor, num_slots: int) -> Tensor:
    """`[B, S]` bool: slots before each row's length."""
    lengths = torch.where(slots < num_slots, slots + 1, 0).amax(dim=1, keepdim=True)
    return torch.arange(num_slots, device=slots.device) < lengths
