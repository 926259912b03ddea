"""`MaskTokenDrafter`: one pass over the last known token and masks after it drafts all K tokens.

Legend: B rows, N new tokens, R committed rows of a pass, M rows after them, K draft tokens, H width
of the head.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.arguments import check_number
from specdec.drafters.head.drafter import HeadDrafter
from specdec.drafters.head.state import HeadState
from specdec.drafters.head.window import WindowPlan
from specdec.drafters.mask_token.correction import DraftBlock, DraftRow
from specdec.drafters.mask_token.head import MaskTokenHead
from specdec.drafters.mask_token.window import MaskWindow, WindowSpec, expand_window
from specdec.drafters.proposal import Kind
from specdec.drafters.tree import Tree, TreePass, TreePlan
from specdec.samplers.noise import Drawing
from specdec.types import Context, Draft

if TYPE_CHECKING:
    from specdec.drafters.visible import Visible
    from specdec.targets import Target


class MaskTokenDrafter(HeadDrafter):
    """Drafts K tokens in one pass of a mask-token head (P-EAGLE, PARD, DFlash and its successors).

    The pass reads the newly committed tokens, which overwrites what an earlier step wrote at their
    positions for masks and rejected tokens, and masks after them. Keys and values of masks stay
    where they are; no later pass sees them before they are overwritten. A step costs one pass
    whatever K is. Drafts end where the head's positions end, and a row of which the head has read
    nothing yet (features: the first step of a one-token prompt) proposes nothing.

    Tokens of one pass are predicted independently of each other, unless the head corrects the
    logits of later ones by those chosen before (`MaskTokenConfig.correction`): then they are drawn
    one by one, each from its corrected distribution, and `Draft.probs` has these.

    Sampled proposals with their probabilities have more accepted than argmax proposals at every
    temperature, also where they are independent (the zoo's head without its correction, T = 1, K =
    4: 2.15 and 1.59 tokens per step), so `proposal="sample"` is the default here as well.

    `from_pretrained` reads P-EAGLE heads (amazon, speculators, SpecForge), PARD models and DFlash
    heads (z-lab, speculators, NVIDIA), with the options of
    `specdec.checkpoints.mask_token.MASK_TOKEN`.

    Args and Raises: as `HeadDrafter`; the head is a `MaskTokenHead`, whose block bounds K. And
    `confidence_threshold`, for a head with a confidence head: a row's draft ends before the first
    token of which the estimate, made before it is drawn, is below; so every lossless sampler stays
    lossless. `None` drafts all K.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> from specdec.lab.training.mask_token import new_head
        >>> target = zoo.load_target()
        >>> drafter = MaskTokenDrafter(new_head(target), target, num_draft_tokens=7)
        >>> SpeculativeGenerator(target, drafter).target.feature_layers
        (2, 8, 13)

    Reference: An et al., arXiv:2504.18583 (PARD); Hui et al., arXiv:2602.01469 (P-EAGLE); Chen et
    al., arXiv:2602.06036 (DFlash).
    """

    head_type = MaskTokenHead
    confidence_threshold: float | None = None

    def __init__(
        self,
        head: MaskTokenHead,
        target: PreTrainedModel | Target,
        num_draft_tokens: int | None = None,
        *,
        proposal: Kind = "sample",
        draft_temperature: float | None = None,
        tree: Tree | str | None = None,
        visible: Visible | None = None,
        confidence_threshold: float | None = None,
    ):
        options = {"proposal": proposal, "draft_temperature": draft_temperature, "tree": tree}
        options["visible"] = visible
        super().__init__(head, target, num_draft_tokens, **options)
        self._stop_below(confidence_threshold)

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path,
        target: PreTrainedModel | Target,
        num_draft_tokens: int | None = None,
        *,
        confidence_threshold: float | None = None,
        **options: Any,
    ) -> Self:
        """As `HeadDrafter.from_pretrained`, with `confidence_threshold` as for the class."""
        drafter = super().from_pretrained(path_or_id, target, num_draft_tokens, **options)
        drafter._stop_below(confidence_threshold)
        return drafter

    def _stop_below(self, threshold: float | None) -> None:
        if threshold is None:
            return
        if self.config.confidence is None:
            raise ValueError("confidence_threshold needs a head with a confidence head; drop it")
        if self.tree is not None:
            raise ValueError("confidence_threshold ends chains early, and tree= drafts trees")
        self.confidence_threshold = check_number("confidence_threshold", threshold, 0, 1)

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> HeadState:
        """Key/value storage for `max_length` tokens per row, and a block after them."""
        length = max_length + (self.config.block_size or 0)
        return super().init_state(batch_size, length, vocab_size=vocab_size, device=device)

    def prefill(self, context: Context, state: HeadState) -> None:
        """Reads the new tokens, and their features where the head has any."""
        self._read(context, state, num_draft_tokens=0)

    def propose(self, context: Context, state: HeadState, drawing: Drawing) -> Draft:
        """One pass of the head; see the class for rows that propose fewer tokens."""
        length = min(self.tree_depth or drawing.num_draft_tokens, drawing.num_draft_tokens)
        num_rows = length
        if self.config.correction is not None and self.head.correction.reads_block:
            num_rows = self.config.max_draft_tokens
        window, *outputs = self._read(context, state, num_draft_tokens=num_rows)
        paths = _Paths(self, context, window, *outputs)
        widen = self.head.over_target_ids
        if state.plan is not None:
            num_valid = torch.where(window.num_valid < length, 0, drawing.num_draft_tokens)
            tree = self.proposal, drawing, paths.first(), paths.expand
            ids = {"ids": self.head.target_ids, "widen": widen}
            return state.plan.grow(*tree, num_valid, **ids)
        drafting = self.proposal.begin(drawing)
        if self.config.correction is None:  # all tokens at once
            drafting.draw(widen(paths.logits))
        else:
            tokens = drafting.draw(widen(paths.first()))
            for i in range(1, length):
                tokens = drafting.draw(widen(paths.follow(i, tokens)))
        num_valid = window.num_valid if num_rows == length else window.num_valid.clamp(max=length)
        return drafting.end(self._num_valid(paths, num_valid, drafting.tokens))

    def _num_valid(self, paths: _Paths, num_valid: Tensor, tokens: list[Tensor]) -> Tensor:
        """`[B]`: the tokens that rows of the window predict, and of these the ones before the first
        one of which the head's estimate is below the threshold.
        """
        if self.confidence_threshold is None:
            return num_valid
        hidden = paths.hidden
        if self.config.confidence == "markov":
            before = torch.cat([paths.known[:, 1:], *tokens], dim=1)[:, :-1]
            before = self.head.correction.markov_w1(before).to(hidden.dtype)
            hidden = torch.cat([hidden, before], dim=-1)
        estimate = self.head.confidence_head(hidden)[..., 0].float().sigmoid()  # [B, K]
        is_sure = (estimate >= self.confidence_threshold).long()
        return torch.minimum(num_valid, is_sure.cumprod(dim=1).sum(dim=1))

    def tree_plan(self, device: torch.device) -> TreePlan | None:
        """Trees of one pass: the best paths by the product of their tokens' probabilities."""
        return self.tree and TreePlan(self.tree, device, is_read=False)

    @property
    def num_after(self) -> int:
        """Those that fill a block count, too."""
        length = self.tree_depth or self.num_draft_tokens
        return max(self.config.num_later(length) - 1, self.num_draft_tokens)

    def _read(
        self, context: Context, state: HeadState, *, num_draft_tokens: int
    ) -> tuple[MaskWindow, Tensor, Tensor | None]:
        """One pass over the new tokens and, for K > 0, the rows after them.

        Returns:
            The rows; the head's outputs `[B, R + M, H]`, of the last M rows alone where features
            are keys and values; and what `hidden_states` made of the features.
        """
        config, cache = self.config, state.cache
        if config.joins_features:
            self.check_features(context)
        spec = self._spec(cache.num_slots, num_draft_tokens)
        window = expand_window(context.tokens, context.start, context.num_new, spec)
        num_committed = window.slots.shape[1] - spec.num_later
        visible = None
        if not config.is_causal:  # rows of a block see all of it that is written
            block = window.slots[:, num_committed:]
            visible = (block < cache.padding_slot)[:, None]
        plan = WindowPlan(cache, window.slots, table=state.angles, visible=visible)
        step = plan.open(0)
        is_keys = config.context == "keys"
        num_known = 1 if is_keys else num_committed
        embeds = self.embed(window.tokens[:, num_committed:] if is_keys else window.tokens)
        hidden = None
        if config.joins_features:
            num_masks = 0 if is_keys else spec.num_later
            hidden = self.head.hidden_states(context.features, num_masks)
        embeds = self.head.with_masks(embeds, num_known)
        return window, self.head(embeds, hidden, step.angles, step.attend), hidden

    def _spec(self, num_slots: int, num_draft_tokens: int) -> WindowSpec:
        """The rows of a pass; without draft tokens the committed ones alone."""
        config = self.config
        num_later = config.num_later(num_draft_tokens) if num_draft_tokens else 0
        return WindowSpec(
            *(config.rows.shift, num_later, config.rows.opens_with_last, config.rows.first_row),
            num_draft_tokens=num_draft_tokens,
            mask_token=config.mask_token_id or 0,
            max_positions=min(config.max_positions or num_slots, num_slots),
            padding_slot=num_slots,
        )


class _Paths:
    """What a pass of the head predicts of paths that grow token by token.

    Args:
        drafter: whose head made the pass.
        context: before the draft.
        window: the rows of the pass.
        out: `[B, N, H]`, of its last N rows.
        features: `[B, R, H]`, of the committed rows, where they are keys and values.

    Attributes:
        hidden: `[B, K, H]`, of the rows that predict draft tokens, after the final norm; of all
            that could for a correction that reads the block.
        logits: `[B, K, Vd]`, of these.
    """

    def __init__(
        self,
        drafter: MaskTokenDrafter,
        context: Context,
        window: MaskWindow,
        out: Tensor,
        features: Tensor | None,
    ):
        head, self._context, self._embed = drafter.head, context, drafter.embed
        sampled = window.sampled - (window.tokens.shape[1] - out.shape[1])
        index = sampled[..., None].expand(-1, -1, out.shape[2])
        self._correction = self._block = None
        if drafter.config.correction is None:
            self.hidden = head.normed(out.gather(1, index))
        else:
            block, self._correction = head.normed(out), head.correction
            self.hidden = block.gather(1, index)
            self._state = self._correction.begin(block, self.known)
        self.logits = head.unembed(self.hidden, drafter.borrowed.lm_head)
        if self._correction is not None and self._correction.reads_block:
            last = (context.num_new - 1).clamp(min=0)[:, None, None].expand_as(features[:, :1])
            feature = features.gather(1, last)[:, 0]
            self._block = self._correction.read(
                DraftBlock(self.logits, self.hidden, feature, self._embed)
            )

    @cached_property
    def known(self) -> Tensor:
        """`[B, 2]`, the last two committed tokens."""
        context = self._context
        last_two = torch.arange(-1, 1, device=context.tokens.device)
        return context.tokens.gather(1, (context.num_new[:, None] + last_two).clamp(min=0))

    def first(self) -> Tensor:
        """Logits `[B, 1, Vd]` of the first draft token."""
        return self.follow(0, self.known[:, 1:])

    def follow(self, index: int, tokens: Tensor, above: Tensor | None = None) -> Tensor:
        """Logits of draft token `index` after paths that end in `tokens` `[B, W]`: `[B, W, Vd]`, or
        `[B, 1, Vd]` where they are all alike. `above` `[B, W]`: the path of the call before that
        each one goes on; `None` if they are the same.
        """
        logits = self.logits[:, index : index + 1]
        if self._correction is None:
            return logits
        state = self._state
        if above is not None:
            state = state.gather(1, above[..., None].expand(-1, -1, state.shape[2]))
        hidden = self.hidden[:, index : index + 1]
        at = DraftRow(index, logits, hidden, tokens, state, self._embed, self._block)
        logits, self._state = self._correction(at)
        return logits

    def expand(self, nodes: TreePass) -> Tensor:
        """Logits of what follows the nodes of a tree."""
        return self.follow(nodes.depth, nodes.tokens, nodes.above)
