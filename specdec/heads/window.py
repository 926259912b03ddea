"""`WindowPlan`: the passes that a head makes over its cache in one step, planned together.

Legend: B rows, N tokens of the first pass, M later passes, D width of an attention head, S slots of
the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from specdec.heads.layers import Attend
from specdec.kernels import CAUSAL, AttentionOptions
from specdec.target.attention import attend
from specdec.target.cache import SlotCache


class Pass(NamedTuple):
    """One pass of a head: angles `[B, 1, N, 2 D]`, rows of the rotary table; what writes keys and
    values and attends; positions `[B, N]`.
    """

    angles: Tensor
    attend: Attend
    positions: Tensor


class WindowPlan:
    """A first pass over several tokens and later passes over one token each. Angles of all passes
    are looked up at once.

    Args:
        cache: the rows' storage.
        slots: `[B, N + M]` int64, the slot of each token; the cache's trash slot for tokens to
            forget.
        num_later: M.
        num_attended: host upper bound of the largest real slot, plus 1.
        table: `[S + 1, 2 D]`, see `rotary_table`.
        positions: `[B, N + M]` int64; `None` for `slots`.
        visible: who sees whom in the first pass, see `Window`; `None` is causal.

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
        positions: Tensor | None = None,
        visible: Tensor | None = None,
    ):
        self._cache, self._slots, self._num_attended = cache, slots, num_attended
        self._num_first = slots.shape[1] - num_later
        self._positions, self._visible = positions, visible
        places = slots if positions is None else positions
        self._angles = F.embedding(places, table)[:, None]  # [B, 1, N + M, 2 D]

    def open(self, index: int) -> Pass:
        """Pass 0, then 1 to M. A pass ends where the next begins: the cache has one window."""
        first, count = (self._num_first + index - 1, 1) if index else (0, self._num_first)
        cache, slots, positions = self._cache, self._slots.narrow(1, first, count), None
        if self._positions is not None:
            positions = self._positions.narrow(1, first, count)
        window = cache.open_window(
            slots,
            num_attended=self._num_attended,
            positions=positions,
            visible=None if index else self._visible,
        )

        def attend_over_cache(
            layer: int,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            options: AttentionOptions = CAUSAL,
        ) -> Tensor:
            keys, values = cache.update(key, value, layer)
            if query.shape[2] == 0:
                return query  # a pass that only writes
            return attend(window, query, keys, values, options).transpose(1, 2)

        angles = self._angles.narrow(2, first, count)
        return Pass(angles, attend_over_cache, slots if positions is None else positions)
