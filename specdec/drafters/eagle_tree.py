"""Trees of an EAGLE head: a pass over some nodes of each depth."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.drafters.head.drafter import HeadDrafter
from specdec.drafters.head.state import HeadState
from specdec.drafters.head.window import ContextRows, WindowPlan
from specdec.drafters.tree import TreePass
from specdec.samplers.noise import Drawing
from specdec.types import Context, Draft


def propose_tree(
    drafter: HeadDrafter,
    context: Context,
    state: HeadState,
    drawing: Drawing,
    rows: ContextRows,
    out: Tensor,
) -> Draft:
    """Drafts a tree after the pass over the new tokens.

    Args:
        drafter: an `EagleDrafter` of trees.
        context, state, drawing: of `propose`.
        rows: the new tokens.
        out: `[B, N, H]`, what the head made of them.
    """
    out, has_any = rows.last(out), context.num_new[:, None] > 0

    def expand(nodes: TreePass) -> Tensor:
        nonlocal out
        offsets = nodes.num_before + torch.arange(nodes.tokens.shape[1], device=out.device)
        slots = rows.next_slots[:, None] + offsets
        positions = (rows.next_slots[:, None] + nodes.depth - 1).clamp(min=0).expand_as(slots)
        plan = WindowPlan(
            state.cache,
            torch.where(has_any, slots, rows.padding_slot),
            table=state.angles,
            positions=positions,
            visible=nodes.visible,
            ahead=rows.ahead,
        )
        step, index = plan.open(0), nodes.above[..., None].expand(-1, -1, out.shape[2])
        hidden = drafter.head.feedback(out).gather(1, index)
        out = drafter.head(drafter.embed(nodes.tokens), hidden, step.angles, step.attend)
        return drafter.logits(out)

    num_valid = context.num_new.clamp(max=1) * drawing.num_draft_tokens
    ids = {"ids": drafter.head.target_ids, "widen": drafter.head.over_target_ids}
    tree = drafter.proposal, drawing, drafter.logits(out), expand, num_valid
    return state.plan.grow(*tree, **ids)
