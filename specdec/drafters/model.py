"""`ModelDrafter`: a smaller HF causal LM drafts for a larger one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.arguments import check_placement
from specdec.drafters.base import check_num_draft_tokens
from specdec.drafters.proposal import Kind, Proposal
from specdec.drafters.tree import Tree, TreePass, TreePlan
from specdec.drafters.tree_drafter import TreeDrafter
from specdec.drafters.vocabulary import CommonVocabulary
from specdec.graphs.tree import shared
from specdec.hf.prompts import prompt_inputs, why_not_read
from specdec.samplers.noise import Drawing
from specdec.slots.cache import SlotCache
from specdec.targets.prompt_inputs import PromptInputs
from specdec.targets.slot_model import SlotModel
from specdec.targets.target import MAX_VOCAB_PADDING, Target
from specdec.types import Context, Draft

if TYPE_CHECKING:
    from specdec.drafters.visible import Visible

OF_DRAFT = "draft_model."
"""Begins the names of row inputs that the draft model makes of a source by its own encoder."""


@dataclass(frozen=True, eq=False)
class ModelDrafterState:
    """The draft model's keys and values, and what its recurrent layers remember.

    A recurrent model's `cache.memory`, its replay included, holds the text before the last but one
    committed token: no window commits those two, and each window of a proposal opens at the first
    of them, so nothing of a window is kept before the next proposal opens further on.

    Args:
        cache: of S slots.
        vocab_size: of the target, over which drafts must be expressed.
        offsets: `[2]`: -1 and 0, relative to the last committed token.
        limit: positions that the draft model has; `None` where no row can reach them.
        plan: how trees grow; `None` for chains.
        vocabulary: common to both models, on the device; `None` where they share all ids.
        offset: `[B]` as of `SlotCache.row_inputs`, of rows whose prompts are more than ids here.
        most_new: new tokens of a context, at most: K drafts and one more.
    """

    cache: SlotCache
    offset: Tensor
    vocab_size: int = shared()
    offsets: Tensor = shared()
    limit: int | None = shared()
    plan: TreePlan | None = shared()
    vocabulary: CommonVocabulary | None = shared(default=None)
    most_new: int = shared(default=1)


class ModelDrafter(TreeDrafter):
    """Drafts K tokens one after the other with a plain causal LM of the target's tokenizer, or of
    one that has tokens in common with it.

    A step costs K forwards: the first re-reads the last two committed tokens (the second of them
    may be a bonus token whose predecessor was never read), the others read one drafted token each.
    Keys and values of accepted drafts stay valid, because they depend on tokens only. A recurrent
    model has no state per token to go back to: each of its forwards reads the last two committed
    tokens and all that are drafted so far, and the next proposal keeps what was accepted. A draft
    model that takes what prompts are beside ids reads it by a tower of its own, except through HF's
    hook, which has encoded them for the target.

    Args:
        model: an HF causal LM in eval mode, on the target's device. Its vocabulary may differ from
            the target's by padding only: surplus logits are cut, missing ones have probability 0.
        num_draft_tokens: K.
        proposal: `"sample"` draws draft tokens and returns their probabilities; `"argmax"` proposes
            the most likely tokens, point masses.
        draft_temperature: of the draft distribution where the target samples; `None` is the
            target's own.
        tree: drafts trees of this shape instead of chains; K is then its nodes. "32x6" is
            `Tree(nodes=32, depth=6)`.
        vocabulary: what the draft model and the target have in common, where it has a tokenizer of
            its own: `CommonVocabulary.of(target_tokenizer, draft_tokenizer)`.
        visible: what tokens see of the text in the draft model, in prompts too: `Sinks(4) +
            Recent(1024)`; `None` for all. A layer with a sliding window sees the last so many of
            its window, and a recurrent layer all.

    Raises:
        TypeError, ValueError: the model cannot be decoded in slots (see `SlotModel`), K < 0,
            layers that cannot be shown a part of a text, or see `Proposal`.

    Example:
        >>> from specdec import ModelDrafter, SpeculativeGenerator, zoo
        >>> target = zoo.load_target()
        >>> drafter = ModelDrafter(zoo.load_drafter("model").model, num_draft_tokens=3)
        >>> SpeculativeGenerator(target, drafter).drafter.num_draft_tokens
        3

    Reference: Leviathan et al., arXiv:2211.17192, section 2; Chen et al., arXiv:2302.01318.
    """

    _set_once = ("model",)

    def __init__(
        self,
        model: PreTrainedModel,
        num_draft_tokens: int = 4,
        *,
        proposal: Kind = "sample",
        draft_temperature: float | None = None,
        tree: Tree | str | None = None,
        vocabulary: CommonVocabulary | None = None,
        visible: Visible | None = None,
    ):
        super().__init__()
        self.num_draft_tokens = check_num_draft_tokens(num_draft_tokens)
        self.tree = tree
        self.proposal = Proposal(proposal, draft_temperature)
        self._slot_model = SlotModel(model)
        self._reader: Target | None = None
        if tree is not None:
            self._slot_model.check_trees()
        self.model, self.visible = self._slot_model.model, visible
        if self._slot_model.reads_source:
            own = self._slot_model.own_inputs
            self.row_inputs = tuple(f"{OF_DRAFT}{name}" for name in own)
        self.vocabulary = vocabulary
        if vocabulary is not None:
            own = torch.cat([vocabulary.draft_ids, vocabulary.readable])
            _check_ids("draft model", own, self._slot_model.vocab_size)

    def _check_visible(self, visible: Visible) -> None:
        from specdec.drafters.visible import check_layers

        super()._check_visible(visible)
        check_layers(self._slot_model.route, type(self.model).__name__, "leave out visible=")

    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """Raises ValueError for another vocabulary or another device, naming both sides, and for a
        model that was edited, cast or put into training mode since it was wrapped.
        """
        own = self._slot_model.vocab_size
        most = min(MAX_VOCAB_PADDING, max(own, vocab_size) // 8)
        if self.vocabulary is not None:
            _check_ids("target", self.vocabulary.target_ids, vocab_size)
        elif abs(own - vocab_size) > most:
            raise ValueError(
                f"the draft model has a vocabulary of {own} and the target one of {vocab_size}; "
                f"they must share a tokenizer (a difference of up to {most} is taken for padding), "
                "or pass vocabulary=CommonVocabulary.of(target_tokenizer, draft_tokenizer)"
            )
        if self.tree is not None:
            common = self.vocabulary and len(self.vocabulary.target_ids)
            self.tree.check_ids(common or min(own, vocab_size))
        check_placement("the draft model", self._slot_model.device, device)
        self._slot_model.check_unchanged(
            "call generator.refresh(), or make the ModelDrafter and its generator again"
        )

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> ModelDrafterState:
        """Key/value storage for `max_length` tokens per row, and the nodes that a step reads."""
        plan = None if self.tree is None else TreePlan(self.tree, device)
        room = plan.max_read if plan else 0
        count = self.num_draft_tokens
        sizes = {"max_window": count + 1, "extra_slots": max(room - count, 0)}
        cache = self._slot_model.init_cache(batch_size, max_length + room, **sizes)
        self._show(cache)
        limit = self._slot_model.max_positions
        if limit is not None and limit >= cache.num_slots:
            limit = None
        offsets = torch.arange(-1, 1, device=device)
        common = self.vocabulary and self.vocabulary.on(device, vocab_size)
        offset = torch.zeros(batch_size, dtype=torch.long, device=device)
        own = offset, vocab_size, offsets, limit, plan, common
        return ModelDrafterState(cache, *own, most_new=count + 1)

    def read_prompts(
        self, prompts: PromptInputs, read: Callable[[Target], PromptInputs] | None
    ) -> PromptInputs | None:
        """All that prompts are, where the draft model takes it and has the target's tokens."""
        if read is None or not prompts.is_causal:
            return None
        model = self._slot_model.model
        takes = prompt_inputs(model) - {"inputs_embeds", "token_type_ids"}
        if self.vocabulary is not None or not takes or why_not_read(model):
            return None
        if self._reader is None or self._reader.model is not model:
            self._reader = Target(model)
        prompts = read(self._reader)
        return prompts if prompts.is_causal else None

    @property
    def source_reader(self) -> tuple[SlotModel, str] | None:
        """The draft model where it has an encoder, and what names of its row inputs begin with."""
        return (self._slot_model, OF_DRAFT) if self._slot_model.reads_source else None

    def prefill(self, context: Context, state: ModelDrafterState) -> None:
        """Reads the root and the new tokens; a recurrent model does not read the last yet."""
        if context.prompt is not None:
            state.offset.copy_(context.prompt.inputs.position_offset)
        options = {"logits_to_keep": None, "is_chunk": True, "prompt": context.prompt}
        self._read(context, state, **options)

    def propose(self, context: Context, state: ModelDrafterState, drawing: Drawing) -> Draft:
        """K forwards of the draft model; fewer tokens are valid where its positions end."""
        if state.plan is not None:
            return self._propose_tree(context, state, drawing)
        num_draft_tokens = drawing.num_draft_tokens
        if drawing.is_shared:  # accepted drafts of others have not been read
            self.prefill(replace(context, num_new=context.num_new - 1), state)
        elif context.tokens.shape[1] - 1 > state.most_new:
            raise ValueError(
                f"{type(self).__name__}.propose reads the root, {state.most_new - 1} tokens of its "
                f"own draft and one more, got {context.tokens.shape[1] - 1} tokens after the root; "
                "read prompts by prefill"
            )
        # The last two committed tokens; a row with no new one (a one-token prompt, an ended row)
        # reads its root twice at the same position.
        pair = (context.num_new[:, None] + state.offsets).clamp(min=0)
        tokens = self._readable(context.tokens.gather(1, pair), state)  # [B, 2]
        positions = context.start[:, None] + pair
        last = positions[:, 1:]  # [B, 1], of the last committed token
        drafting = self.proposal.begin(drawing)
        for i in range(num_draft_tokens):
            if self._slot_model.is_recurrent:
                logits = self._logits_of_window(tokens, positions, context, state)
            else:
                slots = _within_limit(state, last + i if i else positions)
                options = _window_options(context, state) | {"logits_to_keep": 1}
                logits, _ = self._slot_model.forward(tokens, state.cache, slots, **options)
            logits = _fit(logits, state)
            drawn = self._readable(drafting.draw(logits), state)  # [B, 1]
            if self._slot_model.is_recurrent:  # after one committed token, or after two
                after = last - positions[:, :1] + i + 1
                drawn = torch.cat([tokens, drawn], dim=1).scatter(1, after, drawn)
            tokens = drawn
        if state.limit is None:
            return drafting.end()
        return drafting.end((state.limit - last[:, 0]).clamp(0, num_draft_tokens))

    def _logits_of_window(
        self, tokens: Tensor, pair: Tensor, context: Context, state: ModelDrafterState
    ) -> Tensor:
        """Logits `[B, 1, V]` after the last two committed tokens, at the positions `pair`, and the
        drafted ones; where both are the same, the last column is no token.
        """
        first, num_before = pair[:, :1], pair[:, 1:] - pair[:, :1]  # [B, 1]
        index = torch.arange(tokens.shape[1], device=tokens.device)
        is_token = index < len(index) - 1 + num_before
        slots = _within_limit(state, first + index).where(is_token, state.cache.padding_slot)
        options = _window_options(context, state) | {"logits_to_keep": 2}
        logits, _ = self._slot_model.forward(tokens, state.cache, slots, **options)
        return logits.take_along_dim(num_before[..., None], dim=1)

    def _propose_tree(self, context: Context, state: ModelDrafterState, drawing: Drawing) -> Draft:
        """Reads all new tokens again, since accepted nodes were not stored at their positions."""
        cache, last = state.cache, context.num_committed[:, None] - 1

        def expand(nodes: TreePass) -> Tensor:
            count = nodes.tokens.shape[1]
            slots = last + 1 + nodes.num_before + torch.arange(count, device=last.device)
            positions = (last + nodes.depth).expand(-1, count)
            tree = _window_options(context, state) | {
                "positions": positions,
                "visible": nodes.visible,
            }
            tokens = self._readable(nodes.tokens, state)
            return _fit(self._slot_model.forward(tokens, cache, slots, **tree)[0], state)

        logits = self._read(context, state)
        logits = logits.gather(1, context.num_new[:, None, None].expand(-1, -1, logits.shape[2]))
        num_valid = None
        if state.limit is not None:  # all or none: nodes are not in the order of their positions
            fits = last[:, 0] + self.tree.depth <= state.limit
            num_valid = torch.where(fits, drawing.num_draft_tokens, 0)
        logits = _fit(logits, state)
        return state.plan.grow(self.proposal, drawing, logits, expand, num_valid)

    def _read(self, context: Context, state: ModelDrafterState, **options: Any) -> Tensor:
        """Logits of a pass over the root and the new tokens."""
        offsets = torch.arange(context.tokens.shape[1], device=context.start.device)
        slots = _within_limit(state, context.start[:, None] + offsets)
        end = context.num_new[:, None] + (not self._slot_model.is_recurrent)
        slots = torch.where(offsets < end, slots, state.cache.padding_slot)
        # After a row's end there may be anything.
        tokens = self._readable(context.tokens.clamp(0, state.vocab_size - 1), state)
        options = _window_options(context, state) | options
        return self._slot_model.forward(tokens, state.cache, slots, **options)[0]

    def _readable(self, tokens: Tensor, state: ModelDrafterState) -> Tensor:
        """Ids that the draft model has an embedding for; padding ids may lie beyond."""
        if state.vocabulary is not None:
            return state.vocabulary.readable[tokens]
        own = self._slot_model.vocab_size
        return tokens.clamp(max=own - 1) if own < state.vocab_size else tokens


def check_same_tokenizer(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Raises `ValueError` if an id stands for one token in the target's tokenizer and for another
    in the draft model's, naming the first. One of them may have more tokens.

    Example:
        >>> from specdec.lab import zoo
        >>> check_same_tokenizer(zoo.load_tokenizer(), zoo.load_tokenizer())
    """
    theirs, own = ({i: t for t, i in x.get_vocab().items()} for x in (target, draft))
    differing = sorted(i for i in theirs.keys() & own.keys() if theirs[i] != own[i])
    if differing:
        first = differing[0]
        raise ValueError(
            f"the draft model's tokenizer is not the target's: {len(differing)} of {len(theirs)} "
            f"ids are other tokens, id {first} is {own[first]!r} and the target's {theirs[first]!r}"
            "; it needs vocabulary=CommonVocabulary.of(target_tokenizer, draft_tokenizer)"
        )


def _check_ids(whose: str, ids: Tensor, vocab_size: int) -> None:
    if len(ids) == 0 or not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"the common vocabulary has ids that the {whose} of {vocab_size} ids has not; pass "
            "CommonVocabulary.of(target_tokenizer, draft_tokenizer), in this order"
        )


def _window_options(context: Context, state: ModelDrafterState) -> dict[str, Any]:
    """Of all forwards of a step: where the rows' texts begin, and Activated LoRA. Behind prompts
    that take fewer positions than tokens a text stands further back in the target than in a model
    of text.
    """
    given = context.row_inputs
    offset, activated = given.get("position_offset"), "alora_offsets" in given
    own = {name: given[name] for name in ("alora_offsets", "prompt_end") if activated}
    own |= {n.removeprefix(OF_DRAFT): given[n] for n in given if n.startswith(OF_DRAFT)}
    if offset is not None:
        own["position_offset"] = torch.where(state.offset != 0, state.offset, offset.clamp(min=0))
    return {"row_inputs": own}


def _fit(logits: Tensor, state: ModelDrafterState) -> Tensor:
    """Logits over the target's vocabulary: padding cut, and what is not shared impossible."""
    if state.vocabulary is not None:
        return state.vocabulary.over_target_ids(logits, state.vocab_size)
    missing = state.vocab_size - logits.shape[-1]
    if missing == 0:
        return logits
    return F.pad(logits, (0, missing), value=float("-inf"))  # a negative pad cuts


def _within_limit(state: ModelDrafterState, positions: Tensor) -> Tensor:
    """Slots of positions: the padding slot for those that the draft model does not have."""
    if state.limit is None:
        return positions
    return torch.where(positions < state.limit, positions, state.cache.padding_slot)
