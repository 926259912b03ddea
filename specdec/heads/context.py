"""`ContextRows`: the new tokens of a context beside their features, at slots of a head's cache.

Legend: B rows, N new tokens of a context, F width of features, H of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.types import Context


@dataclass(frozen=True, eq=False)
class ContextRows:
    """What a head reads of a context, in the order of positions; made by `read_context`.

    Args:
        tokens: `[B, N]` int64; 0 beyond `counts`.
        features: `[B, N, F]`, the target's; anything beyond `counts`.
        slots: `[B, N]` int64, slot (= position) of each; the trash slot beyond `counts`.
        counts: `[B]` int64, how many tokens of each row are real; 0 or less for none.
        next_slots: `[B]` int64, the slot after each row's last real one.
        trash: the trash slot.
    """

    tokens: Tensor
    features: Tensor | None
    slots: Tensor
    counts: Tensor
    next_slots: Tensor
    trash: int

    def slots_with(self, num_later: int) -> Tensor:
        """`[B, N + num_later]`: `slots`, then those that follow a row's real ones (the trash slot
        for a row without any).
        """
        if num_later == 0:
            return self.slots
        following = self.next_slots[:, None] + torch.arange(num_later, device=self.slots.device)
        later = torch.where(self.counts[:, None] > 0, following, self.trash)
        return torch.cat([self.slots, later], dim=1)

    def last(self, out: Tensor) -> Tensor:
        """`[B, 1, H]`, of `[B, N, H]`: what a head computed for each row's last real token."""
        index = (self.counts - 1).clamp(min=0)[:, None, None]
        return out.gather(1, index.expand(-1, 1, out.shape[2]))


def read_context(context: Context, trash: int) -> ContextRows:
    """Aligns a context's tokens with its features and with slots: entry j sits at position `start +
    j`, holds the token of position `start + j + 1` and the feature that produced it.

    Args:
        context: at most N new tokens per row.
        trash: the slot, which no query attends to, of whatever lies beyond a row's own tokens.

    Example:
        >>> ids, one = torch.tensor([[5, 6, 7]]), torch.tensor([1])
        >>> context = Context(ids, None, start=3 * one, num_new=one, num_attended=5)
        >>> rows = read_context(context, trash=16)
        >>> rows.tokens, rows.slots_with(num_later=2)
        (tensor([[6, 0]]), tensor([[ 3, 16,  4,  5]]))
    """
    tokens, counts = context.tokens[:, 1:], context.num_new
    offsets = torch.arange(tokens.shape[1], device=tokens.device)
    is_real = offsets < counts[:, None]  # [B, N]
    return ContextRows(
        tokens=torch.where(is_real, tokens, 0),
        features=context.features,
        slots=torch.where(is_real, context.start[:, None] + offsets, trash),
        counts=counts,
        next_slots=context.start + counts,
        trash=trash,
    )
