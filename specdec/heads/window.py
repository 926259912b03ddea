"""`WindowPlan`: the passes that a head makes over its cache in one step, planned together.

Legend: B rows, N tokens of the first pass, M later passes, W slots attended over, D width of an
attention head, S slots of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from specdec.cache import SlotCache, Window
from specdec.heads.layers import Attend

ALIGNMENT = 16
"""W is a multiple of this: some attention kernels fail on rows of a mask that start elsewhere than
at a multiple of 16 elements (cuDNN's, with "misaligned address").
"""

Sees = Callable[[Tensor, Tensor], Tensor]
"""(slots of queries, slots of keys), broadcast against each other -> bool: which keys are seen."""


def causal(query: Tensor, key: Tensor) -> Tensor:
    """A token sees itself and everything before it (`Sees`)."""
    return key <= query


def sliding(width: int) -> Sees:
    """A token sees no slot that is `width` or more before its own."""
    return lambda query, key: key > query - width


def block(first: Tensor, last: Tensor) -> Sees:
    """The tokens of a row's block, slots `first` to `last` (`[B]` each), see each other."""
    first, last = (rearrange(slots, "b -> b 1 1 1") for slots in (first, last))
    return lambda query, key: (query >= first) & (query <= last) & (key >= first) & (key <= last)


def both(one: Sees, other: Sees) -> Sees:
    """What both show: `both(causal, sliding(128))`."""
    return lambda query, key: one(query, key) & other(query, key)


def either(one: Sees, other: Sees) -> Sees:
    """What one of the two shows: `either(causal, block(first, last))`."""
    return lambda query, key: one(query, key) | other(query, key)


class Pass(NamedTuple):
    """One pass of a head over its cache.

    Args:
        angles: `[B, 1, N, 2 D]`, rows of the rotary table.
        attend: writes keys and values into the pass's slots, and attends.
        cache: that is written.
        window: of the pass, for layers that attend by themselves (`HFLayer`).
    """

    angles: Tensor
    attend: Attend
    cache: SlotCache
    window: Window


class WindowPlan:
    """A first pass over several tokens and later passes over one token each.

    Slots, angles and masks of all passes are computed at once. The mask of each pass is a
    contiguous block of its own, W slots wide.

    Args:
        cache: the rows' storage.
        slots: `[B, N + M]` int64, the slot (= position) of each token; the cache's trash slot for
            tokens to forget.
        num_later: M.
        num_attended: host upper bound of the largest real slot, plus 1. W is the next multiple of
            16, or S where that is less; slots between the bound and W are masked.
        table: `[S + 1, 2 D]`, see `rotary_table`.
        sees: what a token attends to. Queries at the trash slot are treated as at slot W - 1.

    Example:
        >>> cache, table = SlotCache(1, 32), torch.zeros(33, 4)
        >>> plan = WindowPlan(cache, torch.tensor([[3, 4, 5]]), 1, num_attended=6, table=table)
        >>> plan.open(0).angles.shape, plan.open(1).angles.shape
        (torch.Size([1, 1, 2, 4]), torch.Size([1, 1, 1, 4]))
    """

    def __init__(
        self,
        cache: SlotCache,
        slots: Tensor,
        num_later: int = 0,
        *,
        num_attended: int,
        table: Tensor,
        sees: Sees = causal,
    ):
        self._cache, self._slots = cache, slots
        self._num_first = count = slots.shape[1] - num_later
        self._width = min(-(-num_attended // ALIGNMENT) * ALIGNMENT, cache.num_slots)
        queries, keys = slots.clamp(max=self._width - 1), cache.offsets[: self._width]
        first = sees(queries[:, None, :count, None], keys)  # [B, 1, N, W]
        self._masks = [_additive(first, table.dtype)]
        if num_later:
            later = sees(rearrange(queries[:, count:], "b m -> m b 1 1 1"), keys)
            self._masks += _additive(later, table.dtype).unbind()  # [M, B, 1, 1, W]
        self._angles = F.embedding(slots, table)[:, None]  # [B, 1, N + M, 2 D]

    def open(self, index: int) -> Pass:
        """Pass 0, then 1 to M. A pass ends where the next begins: the cache has one window."""
        first, count = (self._num_first + index - 1, 1) if index else (0, self._num_first)
        cache, mask = self._cache, self._masks[index]
        window = cache.open_window(self._slots.narrow(1, first, count), reach=self._width)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = cache.update(key, value, layer)
            is_grouped = query.shape[1] != key.shape[1]
            return F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, enable_gqa=is_grouped
            )

        return Pass(self._angles.narrow(2, first, count), attend, cache, window)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, `-inf` elsewhere; contiguous, whatever the layout of `visible`."""
    return visible.new_full(visible.shape, -torch.inf, dtype=dtype).masked_fill_(visible, 0.0)
