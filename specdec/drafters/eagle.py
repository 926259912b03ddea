"""`EagleDrafter`: a small head reads the target's features and drafts a chain or a tree after them.

Legend: B rows, N new tokens, K draft tokens, H width of the head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.drafters.head import HeadDrafter, HeadState
from specdec.drafters.tree import TreePass
from specdec.heads.eagle import EagleHead
from specdec.heads.window import ContextRows, WindowPlan
from specdec.samplers.noise import Drawing
from specdec.types import Context, Draft


class EagleDrafter(HeadDrafter):
    """Drafts K tokens with an EAGLE head: one after the other, a chain, or with `tree` depth after
    depth, a tree.

    A step costs K passes of the head. The first re-reads committed tokens with the target's own
    features, which overwrites keys and values computed from guessed ones, and predicts the first
    draft token from the last of them. Each other pass reads one drafted token beside the head's
    output of the pass before. A tree of depth D costs D passes, each over some nodes of one depth.
    A row of which the target has read nothing yet (the first step of a one-token prompt) proposes
    nothing, since there is no feature to draft from.

    `from_pretrained` reads the heads of SafeAILab (yuhuili), SpecForge (lmsys), speculators
    (RedHatAI), NVIDIA and DeepSpec, with the options of `specdec.checkpoints.eagle.EAGLE`.

    EAGLE-3 normalises embeddings, so a target's constant on them makes no difference.
    `EagleConfig.logit_scale` can make up for a target's scale on its logits.

    Args and Raises: as `HeadDrafter`; the head is an `EagleHead`.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> from specdec.heads.layers import LayerConfig
        >>> from specdec.heads.eagle import EagleConfig, EagleHead
        >>> target = zoo.load_target()
        >>> vocab, layer = target.config.vocab_size, LayerConfig(128, 256, 4, 4, 32)
        >>> head = EagleHead(EagleConfig("attention", layer, vocab, vocab, (2, 8, 13), 128))
        >>> drafter = EagleDrafter(head, target, num_draft_tokens=3)
        >>> SpeculativeGenerator(target, drafter).target.feature_layers
        (2, 8, 13)

    Reference: Li et al., arXiv:2401.15077 (EAGLE), arXiv:2406.16858 (EAGLE-2),
    arXiv:2503.01840 (EAGLE-3).
    """

    head_type = EagleHead

    def prefill(self, context: Context, state: HeadState) -> None:
        """Reads the new tokens beside their features."""
        self._extend(context, state, num_later=0)

    def propose(self, context: Context, state: HeadState, drawing: Drawing) -> Draft:
        """A pass of the head for each token of a path; rows without new tokens propose nothing."""
        num_draft_tokens = drawing.num_draft_tokens
        if state.plan is not None:
            return self._propose_tree(context, state, drawing)
        rows, plan, out = self._extend(context, state, num_later=num_draft_tokens - 1)
        out = rows.last(out)  # [B, 1, H]
        drafting = self.proposal.begin(drawing)
        for i in range(num_draft_tokens):
            if i > 0:
                step, hidden = plan.open(i), self.head.feedback(out)
                embeds = self.embed(drafting.tokens[-1])
                out = self.head(embeds, hidden, step.angles, step.attend)
            drafting.draw(self.head.over_target_ids(self.logits(out)))
        return drafting.end(context.num_new.clamp(max=1) * num_draft_tokens)

    def _propose_tree(self, context: Context, state: HeadState, drawing: Drawing) -> Draft:
        rows, _, out = self._extend(context, state, num_later=0)
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
            )
            step, index = plan.open(0), nodes.above[..., None].expand(-1, -1, out.shape[2])
            hidden = self.head.feedback(out).gather(1, index)
            out = self.head(self.embed(nodes.tokens), hidden, step.angles, step.attend)
            return self.logits(out)

        num_valid = context.num_new.clamp(max=1) * drawing.num_draft_tokens
        ids = {"ids": self.head.target_ids, "widen": self.head.over_target_ids}
        tree = self.proposal, drawing, self.logits(out), expand, num_valid
        return state.plan.grow(*tree, **ids)

    def _extend(
        self, context: Context, state: HeadState, *, num_later: int
    ) -> tuple[ContextRows, WindowPlan, Tensor]:
        """Reads the new tokens beside the target's features: the rows, the plan of this pass and
        `num_later` passes of one token, and this pass's output `[B, N, H]`.
        """
        rows = self.read(context, state)
        plan = WindowPlan(state.cache, rows.slots_with(num_later), num_later, table=state.angles)
        first, hidden = plan.open(0), self.head.fuse(rows.features)
        return rows, plan, self.head(self.embed(rows.tokens), hidden, first.angles, first.attend)
