"""`ContextRows`: the new tokens of a context beside their features, at slots of a head's cache.

Legend: B rows, N new tokens of a context, R tokens that a head reads of it, F width of features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.target.cache import SlotCache
from specdec.types import Context


@dataclass(frozen=True, eq=False)
class ContextRows:
    """What a head reads of a context, in the order of positions; made by `read_context`.

    Args:
        tokens: `[B, R]` int64; 0 beyond `counts`.
        features: `[B, N, F]`, the target's; anything beyond `counts`.
        slots: `[B, R]` int64, slot (= position) of each; the trash slot beyond `counts`.
        counts: `[B]` int64, how many tokens of each row are real; 0 or less for none.
        next_slots: `[B]` int64, the slot after each row's last real one.
        cache: that the slots are of.
    """

    tokens: Tensor
    features: Tensor | None
    slots: Tensor
    counts: Tensor
    next_slots: Tensor
    cache: SlotCache

    def slots_with(self, num_later: int) -> Tensor:
        """`[B, R + num_later]`: `slots`, then those that follow a row's real ones (the trash slot
        for a row without any).
        """
        if num_later == 0:
            return self.slots
        following = self.next_slots[:, None] + torch.arange(num_later, device=self.slots.device)
        later = torch.where(self.counts[:, None] > 0, following, self.cache.trash)
        return torch.cat([self.slots, later], dim=1)

    def last(self, out: Tensor) -> Tensor:
        """`[B, 1, H]`, of `[B, R, H]`: what a head computed for each row's last real token."""
        index = (self.counts - 1).clamp(min=0)[:, None, None]
        return out.gather(1, index.expand(-1, 1, out.shape[2]))


def read_context(context: Context, cache: SlotCache, *, shift: int = 1) -> ContextRows:
    """Aligns a context's tokens with its features and with the slots of a cache.

    Entry j sits at position `start + j` and holds the token of position `start + j + shift`:

    - `shift=1` (EAGLE, MTP, P-EAGLE): R = N. The feature of a position stands beside the token that
      it produced.
    - `shift=0` (PARD): R = N + 1. A token stands at its own position, the anchor first; the last
      token has no feature yet.

    Args:
        context: at most N new tokens per row. Whatever lies beyond a row's own goes to the trash
            slot, which no query attends to.
        cache: the head's.
        shift: 0 or 1.

    Example:
        >>> ids, one = torch.tensor([[5, 6, 7]]), torch.tensor([1])
        >>> context = Context(ids, None, start=3 * one, num_new=one, num_attended=5)
        >>> rows = read_context(context, SlotCache(1, 16, {}))
        >>> rows.tokens, rows.slots_with(num_later=2)
        (tensor([[6, 0]]), tensor([[ 3, 16,  4,  5]]))
        >>> read_context(context, SlotCache(1, 16, {}), shift=0).tokens
        tensor([[5, 6, 0]])
    """
    tokens = context.tokens[:, shift:]
    offsets = torch.arange(tokens.shape[1], device=tokens.device)
    counts = context.num_new + 1 - shift
    is_real = offsets < counts[:, None]  # [B, R]
    return ContextRows(
        tokens=torch.where(is_real, tokens, 0),
        features=context.features,
        slots=torch.where(is_real, context.start[:, None] + offsets, cache.trash),
        counts=counts,
        next_slots=context.start + counts,
        cache=cache,
    )
