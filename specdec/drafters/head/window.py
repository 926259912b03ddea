"""`read_context`: the new tokens of a context beside their features, at slots of a head's cache;
`WindowPlan`: the passes that a head makes over them in one step, planned together.

Legend: B rows, N new tokens of a context or tokens of the first pass, M later passes, F width of
features, H of a head, D of an attention head, S slots of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.drafters.head.layers import Attend
from specdec.kernels import AttentionOptions
from specdec.kernels.types import CAUSAL
from specdec.slots.attention import attend
from specdec.slots.cache import SlotCache
from specdec.types import Context


@dataclass(frozen=True, eq=False)
class ContextRows:
    """What a head reads of a context, in the order of positions; made by `read_context`.

    Args:
        tokens: `[B, N]` int64; 0 beyond `counts`.
        features: `[B, N, F]`, the target's; anything beyond `counts`.
        slots: `[B, N]` int64, slot (= position) of each; the padding slot beyond `counts`.
        counts: `[B]` int64, how many tokens of each row are real; 0 or less for none.
        next_slots: `[B]` int64, the slot after each row's last real one.
        padding_slot: the padding slot.
        positions: `[B, N]`, or `[3, B, N]` of three axes, int64: rotary positions of the rows of a
            prompt that is more than ids, where these are not its slots.
        ahead: `[B]` int64, rotary positions of all other rows, less their slots; `None` for 0.
    """

    tokens: Tensor
    features: Tensor | None
    slots: Tensor
    counts: Tensor
    next_slots: Tensor
    padding_slot: int
    positions: Tensor | None = None
    ahead: Tensor | None = None

    def slots_with(self, num_later: int) -> Tensor:
        """`[B, N + num_later]`: `slots`, then those that follow a row's real ones (the padding slot
        for a row without any).
        """
        if num_later == 0:
            return self.slots
        following = self.next_slots[:, None] + torch.arange(num_later, device=self.slots.device)
        later = torch.where(self.counts[:, None] > 0, following, self.padding_slot)
        return torch.cat([self.slots, later], dim=1)

    def last(self, out: Tensor) -> Tensor:
        """`[B, 1, H]`, of `[B, N, H]`: what a head computed for each row's last real token."""
        index = (self.counts - 1).clamp(min=0)[:, None, None]
        return out.gather(1, index.expand(-1, 1, out.shape[2]))


def read_context(context: Context, padding_slot: int) -> ContextRows:
    """Aligns a context's tokens with its features and with slots: entry j sits at position `start +
    j`, holds the token of position `start + j + 1` and the feature that produced it.

    Args:
        context: at most N new tokens per row.
        padding_slot: the slot, which no query attends to, of what lies beyond a row's own tokens.

    Example:
        >>> ids, one = torch.tensor([[5, 6, 7]]), torch.tensor([1])
        >>> context = Context(ids, None, start=3 * one, num_new=one)
        >>> rows = read_context(context, padding_slot=16)
        >>> rows.tokens, rows.slots_with(num_later=2)
        (tensor([[6, 0]]), tensor([[ 3, 16,  4,  5]]))
    """
    tokens, counts = context.tokens[:, 1:], context.num_new
    offsets = torch.arange(tokens.shape[1], device=tokens.device)
    is_real = offsets < counts[:, None]  # [B, N]
    return ContextRows(
        tokens=torch.where(is_real, tokens, 0),
        features=context.features,
        slots=torch.where(is_real, context.start[:, None] + offsets, padding_slot),
        counts=counts,
        next_slots=context.start + counts,
        padding_slot=padding_slot,
    )


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
        slots: `[B, N + M]` int64, the slot of each token; the cache's padding slot for tokens to
            forget.
        num_later: M.
        table: `[S + 1, 2 D]`, see `rotary_table`.
        positions: `[B, N + M]` int64; `None` for `slots`.
        visible: who sees whom in the first pass, see `Window`; `None` is causal.
        ahead: `[B]` int64, added to the positions that rows are turned to; `None` for none.

    Example:
        >>> cache, table = SlotCache(1, 32, {}), torch.zeros(33, 4)
        >>> plan = WindowPlan(cache, torch.tensor([[3, 4, 5]]), 1, table=table)
        >>> plan.open(0).angles.shape, plan.open(1).angles.shape
        (torch.Size([1, 1, 2, 4]), torch.Size([1, 1, 1, 4]))
    """

    def __init__(
        self,
        cache: SlotCache,
        slots: Tensor,
        num_later: int = 0,
        *,
        table: Tensor,
        positions: Tensor | None = None,
        visible: Tensor | None = None,
        ahead: Tensor | None = None,
    ):
        self._cache, self._slots = cache, slots
        self._num_first = slots.shape[1] - num_later
        self._positions, self._visible = positions, visible
        rotated_to = slots if positions is None else positions
        if ahead is not None:
            rotated_to = (rotated_to + ahead[:, None]).clamp(0, len(table) - 1)
        self._angles = F.embedding(rotated_to, table)[:, None]  # [B, 1, N + M, 2 D]

    def open(self, index: int) -> Pass:
        """Pass 0, then 1 to M. A pass ends where the next begins: the cache has one window."""
        first, count = (self._num_first + index - 1, 1) if index else (0, self._num_first)
        cache, slots, positions = self._cache, self._slots.narrow(1, first, count), None
        if self._positions is not None:
            positions = self._positions.narrow(1, first, count)
        visible = None if index else self._visible
        window = cache.open_window(slots, positions=positions, visible=visible)

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
