"""`HeadState`: what a head remembers of a batch.

Legend: B rows, D width of an attention head, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
