"""`WindowPlan`: the passes that a head makes over its cache in one step, planned together.

Legend: B rows, N tokens of the first pass, M later passes, W slots attended over, D width of an
attention head, S slots of the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from specdec.heads.layers import Attend
from specdec.kernels import AttentionOptions, attends_raggedly, ragged_attention
from specdec.target.cache import SlotCache, Window, round_up
from specdec.target.masks import Visible, causal, slot_mask, window_options


class Pass(NamedTuple):
    """One pass of a head over its cache.

    Args:
        angles: `[B, 1, N, 2 D]`, rows of the rotary table.
        attend: writes keys and values into the pass's slots, and attends.
        cache: that is written; `None` for a pass over a whole text without a cache.
        window: of the pass, for layers that attend by themselves (`HFLayer`).
    """

    angles: Tensor
    attend: Attend
    cache: SlotCache | None
    window: Window


class WindowPlan:
    """A first pass over several tokens and later passes over one token each.

    Slots and angles of all passes are computed at once. Passes of few tokens on a GPU attend by
    `ragged_attention`. Others need dense masks, which are all made when the first is needed; the
    mask of each pass is a contiguous block of its own, W slots wide.

    Args:
        cache: the rows' storage.
        slots: `[B, N + M]` int64, the slot (= position) of each token; the cache's trash slot for
            tokens to forget.
        num_later: M.
        num_attended: host upper bound of the largest real slot, plus 1. W is the next multiple of
            `SLOT_MULTIPLE`; slots between the bound and W are masked.
        table: `[S + 1, 2 D]`, see `rotary_table`.
        visible: what a token attends to; see `slot_mask`.
        num_silent: so many tokens at the start of the first pass bring keys and values and no
            query.

    Example:
        >>> import torch
        >>> cache, table = SlotCache(1, 32, {}), torch.zeros(33, 4)
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
        visible: Visible = causal,
        num_silent: int = 0,
    ):
        self._cache, self._slots = cache, slots
        self._num_first = slots.shape[1] - num_later
        self._width = min(round_up(num_attended), cache.num_slots)
        self._num_silent = num_silent
        self._visible, self._dtype = visible, table.dtype
        self._masks: list[Tensor] = []
        self._options: dict[int, AttentionOptions | None] = {}
        self._angles = F.embedding(slots, table)[:, None]  # [B, 1, N + M, 2 D]

    def open(self, index: int) -> Pass:
        """Pass 0, then 1 to M. A pass ends where the next begins: the cache has one window."""
        first, count = (self._num_first + index - 1, 1) if index else (0, self._num_first)
        cache, slots = self._cache, self._slots.narrow(1, first, count)
        window = cache.open_window(slots, num_attended=self._width)
        queried = slots if index else slots[:, self._num_silent :]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = cache.update(key, value, layer)
            if query.shape[2] == 0:
                return query  # a pass that only writes
            options = self._ragged_options(index, queried, query, keys)
            if options is not None:
                return ragged_attention(query, keys, values, queried, options).transpose(1, 2)
            is_grouped = query.shape[1] != key.shape[1]
            return F.scaled_dot_product_attention(
                query, keys, values, attn_mask=self._mask(index), enable_gqa=is_grouped
            )

        return Pass(self._angles.narrow(2, first, count), attend, cache, window)

    def _ragged_options(
        self, index: int, slots: Tensor, query: Tensor, keys: Tensor
    ) -> AttentionOptions | None:
        """Of a pass that attends by `ragged_attention`; `None` for one that needs a mask."""
        if not attends_raggedly(query, keys):
            return None
        if index not in self._options:
            self._options[index] = window_options(slots, self._visible)
        options = self._options[index]
        if options is None or options.window_visible is None:
            return options
        return options if attends_raggedly(query, keys, has_window_mask=True) else None

    def _mask(self, index: int) -> Tensor:
        """The dense mask of a pass, `[B, 1, N or 1, W]`."""
        if not self._masks:
            count, kind = self._num_first, (self._width, self._visible, self._dtype)
            queried = self._slots[:, None, self._num_silent : count]
            self._masks.append(slot_mask(queried, *kind))
            later = rearrange(self._slots[:, count:], "b m -> m b 1 1")
            self._masks += slot_mask(later, *kind).unbind()
        return self._masks[index]
