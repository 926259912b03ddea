"""EAGLE: a small head reads the target's features and drafts a chain or a tree after them.

Weights (`EagleHead`) and drafter.

Legend: B rows, N tokens of a pass, K draft tokens, H width of the head, F width of all features
together, V target vocabulary, Vd ids that the head can propose, D width of an attention head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specdec.drafters.head.drafter import HeadDrafter
from specdec.drafters.head.features import FeatureHead, FusingLayer
from specdec.drafters.head.layers import Attend, RMSNorm
from specdec.drafters.head.state import HeadState
from specdec.drafters.head.window import ContextRows, WindowPlan
from specdec.samplers.noise import Drawing
from specdec.types import Context, Draft

if TYPE_CHECKING:
    from specdec.drafters.eagle_config import EagleConfig
    from specdec.targets.prompt_inputs import PromptInputs


class EagleHead(FeatureHead):
    """The weights of a head, under the names of the public checkpoints.

    Row t of its inputs holds (embedding of token t + 1, feature of position t), sits at rotary
    position t and predicts token t + 2. Every method works on any number of rows and tokens.

    Example:
        >>> from specdec.drafters.eagle_config import EagleConfig
        >>> from specdec.drafters.head.layer_config import LayerConfig
        >>> config = EagleConfig("attention", LayerConfig(8, 16, 2, 2, 4), 9, 9, (1, 2, 3), 8)
        >>> head = EagleHead(config)
        >>> sorted(name for name in head.state_dict() if "layers" not in name)
        ['fc.weight', 'lm_head.weight', 'norm.weight']
        >>> head.fuse(torch.zeros(1, 5, 24)).shape
        torch.Size([1, 5, 8])

    Reference: Li et al., arXiv:2401.15077 (EAGLE), arXiv:2406.16858 (EAGLE-2), arXiv:2503.01840
    (EAGLE-3).
    """

    def __init__(self, config: EagleConfig, target_ids: Tensor | None = None):
        super().__init__(config, target_ids)
        if config.feedback_norm and not config.output_norm:
            self.norm = RMSNorm(config.hidden_size, config.layer.rms_norm_eps)

    def build_first_layer(self) -> nn.Module:
        """One that fuses, or a plain one without the norm that `fc` makes needless."""
        config = self.config
        if config.fusion == "input":
            from specdec.drafters.head.decoder_layer import DecoderLayer

            return DecoderLayer(config.layer, 0, has_input_norm=False)
        return FusingLayer(config.layer, norm_before_residual=config.norm_before_residual)

    def forward(self, embeds: Tensor, hidden: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        """One pass.

        Args:
            embeds: `[B, N, H]`, of the tokens that follow the positions of `hidden`.
            hidden: `[B, N, H]`, from `fuse`, or from `feedback` of the pass before.
            angles: `[B, 1, N, 2 D]`, rows of `rotary_table` at the positions of `hidden`.
            attend: how queries find keys (see `Attend`).

        Returns:
            `[B, N, H]`, for `logits` and `feedback`.
        """
        first, *later = self.layers
        if self.config.fusion == "attention":
            out = first(embeds, hidden, angles, attend)
        else:
            out = first(self.fc(torch.cat([embeds, hidden], dim=-1)), angles, attend)
        for layer in later:
            out = layer(out, angles, attend)
        return out

    def feedback(self, out: Tensor) -> Tensor:
        """The hidden states `[B, N, H]` of the next pass, where the target's are not known yet."""
        return self.norm(out) if self.config.feedback_norm else out


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
        >>> from specdec.drafters.head.layer_config import LayerConfig
        >>> from specdec.drafters.eagle import EagleDrafter, EagleHead
        >>> from specdec.drafters.eagle_config import EagleConfig
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

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> HeadState:
        """As `HeadDrafter`'s, and where rows of pictures are."""
        state = super().init_state(batch_size, max_length, vocab_size=vocab_size, device=device)
        from specdec.drafters.head.pictures import placed_rows

        own = {"sees_pictures": self.config.sees_pictures, "axes": self.config.layer.axes}
        return replace(state, placed=placed_rows(batch_size, **own, device=device))

    def read_prompts(self, prompts: PromptInputs, read: Any) -> PromptInputs | None:
        """The target's own, for a head that reads pictures otherwise than text."""
        is_plain = self.config.sees_pictures and self.config.layer.axes is None
        return None if is_plain else prompts

    def read(self, context: Context, state: HeadState) -> ContextRows:
        """As `HeadDrafter`'s, at the slots of its rows."""
        rows = super().read(context, state)
        return rows if state.placed is None else state.placed.place(rows, context.prompt)

    def prefill(self, context: Context, state: HeadState) -> None:
        """Reads the new tokens beside their features."""
        self._extend(context, state, num_later=0)

    def propose(self, context: Context, state: HeadState, drawing: Drawing) -> Draft:
        """A pass of the head for each token of a path; rows without new tokens propose nothing."""
        num_draft_tokens = drawing.num_draft_tokens
        if state.plan is not None:
            from specdec.drafters.eagle_tree import propose_tree

            rows, _, out = self._extend(context, state, num_later=0)
            return propose_tree(self, context, state, drawing, rows, out)
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
        own = {"table": state.angles, "ahead": rows.ahead}
        plan = WindowPlan(state.cache, rows.slots_with(num_later), num_later, **own)
        first, hidden = plan.open(0), self.head.fuse(rows.features)
        if rows.positions is not None:
            from specdec.drafters.head.rotary import angles_at

            angles = angles_at(state.angles, rows.positions, state.placed.axes)
            first = first._replace(angles=angles[:, None])
        return rows, plan, self.head(self.embed(rows.tokens), hidden, first.angles, first.attend)
