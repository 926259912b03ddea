"""`HeadState`: what a head remembers of a batch.

Legend: B rows, D width of an attention head, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.graphs.tree import shared
from specdec.slots.cache import SlotCache

if TYPE_CHECKING:
    from specdec.drafters.head.pictures import PlacedRows
    from specdec.drafters.tree import TreePlan


@dataclass(frozen=True, eq=False)
class HeadState:
    """The head's keys and values, row t of a text in slot t, and `[S + 1, 2 D]` angles of the
    layers' `rotary_table`, both `None` for a head without decoder layers; for a drafter of trees,
    how they grow; of a head whose rows are elsewhere than their slots say, where.
    """

    cache: SlotCache | None
    angles: Tensor | None = shared()
    plan: TreePlan | None = shared(default=None, kw_only=True)
    placed: PlacedRows | None = field(default=None, kw_only=True)


def head_state(
    head: Any,
    num_layers: int,
    sizes: tuple[int, int],
    plan: TreePlan | None,
    *,
    extra_slots: int,
    device: torch.device,
) -> HeadState:
    """Key/value storage for the tokens of each row, and the nodes that a step reads.

    Args:
        head: of a `HeadDrafter`, with decoder layers.
        num_layers: decoder layers in use.
        sizes: B, and the most tokens of a row.
        plan: of trees.
        extra_slots: so many tokens more than K may be behind the text.
        device: where the tensors are.
    """
    layer, (rows, most) = head.config.layer, sizes
    where = {"dtype": head.dtype, "device": device}
    shapes = dict.fromkeys(range(num_layers), layer.key_value_shape(**where))
    most += plan.max_read if plan else 0
    cache = SlotCache(rows, most, shapes, extra_slots=extra_slots)
    return HeadState(cache, layer.rotary_table(cache.num_slots + 1, **where), plan=plan)
