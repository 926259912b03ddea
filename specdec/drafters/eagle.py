"""`EagleDrafter`: a small head reads the target's features and drafts a chain after them.

Legend: B rows, N new tokens, K draft tokens, H width of the head.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from specdec.checkpoints.eagle import EAGLE
from specdec.checkpoints.export import Layout, save_head
from specdec.drafters.head import HeadDrafter, HeadState
from specdec.heads.eagle import EagleHead
from specdec.heads.window import ContextRows, WindowPlan
from specdec.samplers.drawing import Drawing
from specdec.types import Context, Draft


class EagleDrafter(HeadDrafter):
    """Drafts K tokens one after the other with an EAGLE head, a chain.

    A step costs K passes of the head. The first re-reads committed tokens with the target's own
    features, which overwrites keys and values computed from guessed ones, and predicts the first
    draft token from the last of them. Each other pass reads one drafted token beside the head's
    output of the pass before. A row of which the target has read nothing yet (the first step of a
    one-token prompt) proposes nothing, since there is no feature to draft from.

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

    Reference: Li et al., arXiv:2401.15077 (EAGLE), arXiv:2406.16858 (EAGLE-2, here as a chain),
    arXiv:2503.01840 (EAGLE-3).
    """

    family = EAGLE
    head_type = EagleHead

    def save_pretrained(
        self, folder: str | Path, layout: Layout = "safeailab", *, verifier: str | None = None
    ) -> tuple[str, ...]:
        """Writes the head as vLLM and SGLang read it; Args, Returns and Raises as `save_head`.

        A speculators file names the target as `verifier`; the default is where the target was
        loaded from.
        """
        target = self._borrowed
        return save_head(
            self.head,
            folder,
            layout,
            lm_head=target.lm_head.weight,
            embed_tokens=target.embeddings.weight,
            num_draft_tokens=max(self.num_draft_tokens, 1),
            verifier=verifier or target.name,
            target_layers=target.num_layers,
        )

    def prefill(self, context: Context, state: HeadState) -> None:
        """Reads the new tokens beside their features."""
        self._extend(context, state, num_later=0)

    def propose(self, context: Context, state: HeadState, drawing: Drawing) -> Draft:
        """K passes of the head; a row without any new token proposes nothing."""
        num_draft_tokens = drawing.num_draft_tokens
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

    def _extend(
        self, context: Context, state: HeadState, *, num_later: int
    ) -> tuple[ContextRows, WindowPlan, Tensor]:
        """Reads the new tokens beside the target's features: the rows, the plan of this pass and
        `num_later` passes of one token, and this pass's output `[B, N, H]`.
        """
        rows = self.read(context, state)
        plan = WindowPlan(
            state.cache,
            rows.slots_with(num_later),
            num_later,
            num_attended=context.num_attended,
            table=state.angles,
        )
        first, hidden = plan.open(0), self.head.fuse(rows.features)
        return rows, plan, self.head(self.embed(rows.tokens), hidden, first.angles, first.attend)
