"""`SelfDrafter`: the target drafts for itself, with a part of its work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.arguments import check_integer, check_placement, shown
from specdec.drafters.base import check_num_draft_tokens
from specdec.drafters.proposal import Kind, Proposal
from specdec.drafters.tree_drafter import LogitsDrafter
from specdec.drafters.visible import (
    Recent,
    Visible,
    attention_scores,
    check_layers,
    check_visible,
)
from specdec.samplers.noise import Drawing
from specdec.slots.cache import SlotCache
from specdec.slots.copies import copy_slots
from specdec.targets.target import Target
from specdec.targets.text import TargetText
from specdec.types import Context, Draft, Queries


class SelfDrafter(LogitsDrafter):
    """Drafts with the target itself, behind the text, over the target's own keys and values: with a
    part of the text, with some of the layers, with cheaper weights, or with all of these.

    It needs no training and no cache of its own to keep: what it writes lies where the target's
    next step writes, and a table of the visible slots is gathered from the target's cache once per
    proposal. A draft step then reads the weights that run and the visible slots, however long the
    text is.

    Args:
        target: that it drafts for: the model, or the generator's `Target`.
        num_draft_tokens: K.
        visible: the tokens that it sees, `Sinks(4) + Recent(1024)`; `None` for all. A layer with a
            sliding window sees the last so many of its window.
        layers: those that run, by index, or an integer E for an early exit after the first E; then
            come the final norm and the vocabulary head. `None` for all.
        model: runs in the target's place: the same architecture with other weights (quantised,
            pruned), over the same keys and values. `None` for the target's own.
        proposal: `"sample"` draws draft tokens and returns their probabilities; `"argmax"` proposes
            the most likely tokens, point masses.
        draft_temperature: of the draft distribution where the target samples; `None` is the
            target's own.

    Raises:
        TypeError, ValueError: a target with a recurrent state, or with chunks of attention beside
            `visible`; layers that do not exist; a `model` with other keys and values; K < 0; or see
            `Proposal`.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> from specdec.drafters import Recent, SelfDrafter, Sinks
        >>> target = zoo.load_target()
        >>> drafter = SelfDrafter(target, 3, visible=Sinks(4) + Recent(64))
        >>> SpeculativeGenerator(target, drafter).drafter.visible.count
        68

    Reference: MagicDec, arXiv:2408.11049; LayerSkip, arXiv:2404.16710; SWIFT, arXiv:2410.06916.
    """

    reads_target = True
    _not_set = ("tree", "draft_temperature")
    _set_once = ("layers",)

    def __init__(
        self,
        target: Target | PreTrainedModel,
        num_draft_tokens: int = 4,
        *,
        visible: Visible | None = None,
        layers: int | Sequence[int] | None = None,
        model: PreTrainedModel | None = None,
        proposal: Kind = "sample",
        draft_temperature: float | None = None,
    ):
        super().__init__()
        self.num_draft_tokens = check_num_draft_tokens(num_draft_tokens)
        self.proposal = Proposal(proposal, draft_temperature)
        target = target if isinstance(target, Target) else Target(target)
        target.check_reads_ahead()
        self.layers, self._target = _layers_that_run(target, layers), target
        self._runs, self.model = target, None
        if model is not None:
            self._runs = Target(model, edits=target.edits)
            self.model = self._runs.model
            _check_same(self._runs, target, "model is the same architecture with other weights")
        if self.layers is not None:
            self._runs = self._runs.part(self.layers)
        self.visible = visible

    def __setattr__(self, name: str, value: Any) -> None:
        """Reads the queries that `visible` needs."""
        super().__setattr__(name, value)
        if name == "visible":
            windows = self._target.layer_windows
            full = (i for i in self._shapes if windows.get(i) is None)
            self.feature_layers = tuple(map(Queries, full)) if value and value.top else ()

    def _check_visible(self, visible: Visible) -> None:
        """Raises an error if a table of slots cannot express the visible positions."""
        target, name = self._target, type(self._target.model).__name__
        check_visible(visible)
        check_layers(target.route, name, "use layers= or model=")
        if visible.top and target.route.attention is None:
            raise ValueError(
                f"{name} does not call HF's attention interface, so its queries are not known; use "
                "Sinks and Recent"
            )
        if visible.top and getattr(target.config, "kv_lora_rank", None):
            raise ValueError(
                f"{name} stores latents in place of keys, with which no query can be multiplied; "
                "use Sinks and Recent"
            )

    @property
    def _shapes(self) -> dict:
        """Of keys and values of the layers that run; other ones after the target was cast."""
        shapes = self._target.route.shapes
        return {i: s for i, s in shapes.items() if self.layers is None or i in self.layers}

    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """Raises ValueError for another vocabulary or device, and for a model that was edited."""
        if vocab_size != self._target.vocab_size:
            raise ValueError(
                f"a SelfDrafter over a target of {self._target.vocab_size} ids cannot draft for "
                f"one of {vocab_size}; make it with the generator's target"
            )
        check_placement("the model that drafts", self._runs.device, device)
        self._runs.check_unchanged(
            "call generator.refresh(), or make the SelfDrafter and its generator again"
        )
        # Once more after a refresh: the target, or the model that drafts, may have been cast.
        if self.model is not None:
            _check_same(self._runs, self._target, "cast both to one data type")
        if self.visible is not None:
            self._check_visible(self.visible)

    def check_target(self, target: Target) -> None:
        """Raises ValueError for another target than that which the drafter was made with."""
        own = self._target
        if target.model is not own.model:
            raise ValueError(
                f"a SelfDrafter drafts with the target that it was made with, a "
                f"{type(own.model).__name__}, and the generator's target is another "
                f"{type(target.model).__name__}; make it with the generator's target, and pass "
                "model= to draft with other weights"
            )
        if target.route is not own.route:
            _check_same(target, own, "make it with the generator's target")

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> SlotCache | None:
        """A table for the visible slots and the draft; `None` where all of the text is seen."""
        if self.visible is None:
            return None
        num_slots = min(self.visible.count, max_length) + max(self.num_draft_tokens, 1)
        return SlotCache(batch_size, num_slots, self._shapes, extra_slots=0)

    def prefill(self, context: Context, state: SlotCache | None) -> None:
        """The target has read the prompt."""

    def propose(self, context: Context, state: SlotCache | None, drawing: Drawing) -> Draft:
        """K forwards of one token each, the first of which reads the last committed token."""
        self.check_target(context.target.target)
        text = context.target if state is None else self._visible_text(context, state)
        tokens = context.tokens.gather(1, context.num_new.clamp(min=0)[:, None])
        drafting = self.proposal.begin(drawing)
        for i in range(drawing.num_draft_tokens):
            logits, _ = text.forward(self._runs, tokens, offset=i)
            tokens = drafting.draw(logits)
        if not self.feature_layers:
            return drafting.end()
        has_queries = context.num_new > 0  # of a token that the target has read
        return drafting.end(torch.where(has_queries, drawing.num_draft_tokens, 0))

    def _visible_text(self, context: Context, table: SlotCache) -> TargetText:
        """The text as far as it is visible: tokens in consecutive slots of the table, whose keys
        are those of their own positions, and behind them the draft, whose positions go on.
        """
        text, visible = context.target, self.visible
        width, lengths = table.num_slots + 1, text.lengths
        near = Recent(visible.count).slots(lengths, width)
        far = dict.fromkeys(self._shapes, visible.slots(lengths, width))
        if self.feature_layers and text.cache.in_use > visible.count:
            far |= self._top_slots(context, width)
        windows = self._target.layer_windows
        copy_slots(table, text.cache, {i: far[i] if windows.get(i) is None else near for i in far})
        num_seen = lengths.clamp(max=visible.count)
        return text.over(table, num_seen)

    def _top_slots(self, context: Context, width: int) -> dict[int, Tensor]:
        """By layer, the slots that the last verified token's queries choose."""
        text, lengths = context.target, context.target.lengths
        last = (context.num_new - 1).clamp(min=0)[:, None, None]
        queries = context.features.take_along_dim(last, dim=1)[:, 0]  # [B, F]
        layers = [queries_of.layer for queries_of in self.feature_layers]
        keys = [text.keys_values(layer)[0] for layer in layers]
        sizes = self._target.feature_widths(self.feature_layers)
        scores = [
            attention_scores(query.unflatten(1, (-1, k.shape[3])), k, lengths)
            for query, k in zip(queries.split(sizes, dim=1), keys, strict=True)
        ]
        heads = [k.shape[1] for k in keys]
        top = self.visible.top_slots(torch.cat(scores, dim=1), lengths).split(heads, dim=1)
        pairs = zip(layers, top, strict=True)
        return {layer: self.visible.slots(lengths, width, chosen) for layer, chosen in pairs}


def _layers_that_run(target: Target, layers: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """As indices in order."""
    if layers is None:
        return None
    if isinstance(layers, int):
        layers = range(check_integer("layers", layers, 1, target.num_layers))
    if not isinstance(layers, Sequence | range):
        raise TypeError(f"layers must be an integer or a list of integers, got {shown(layers)}")
    found = tuple(sorted({*layers}))
    if not found:
        raise ValueError("layers are those that run, and are empty; None runs all")
    if getattr(target.config, "num_kv_shared_layers", 0) and len(found) < target.num_layers:
        raise ValueError(
            f"layers of {type(target.model).__name__} read keys and values of other layers, so "
            "none can be left out; use visible= or model="
        )
    if target.route.is_indexed and len(found) < target.num_layers:
        raise ValueError(
            f"layers of {type(target.model).__name__} read keys that an indexer of another layer "
            "may have chosen, so none can be left out; use visible= or model="
        )
    return found


def _check_same(model: Target, target: Target, advice: str) -> None:
    """Raises ValueError if the model cannot run over the target's keys and values."""
    own, theirs = (one.route.shapes for one in (model, target))
    if model.vocab_size == target.vocab_size and own == theirs:
        return
    layer = next((i for i in {**own, **theirs} if own.get(i) != theirs.get(i)), 0)
    found, expected = (
        f"{one.vocab_size} ids and in layer {layer} {one.route.shapes.get(layer)}"
        for one in (model, target)
    )
    raise ValueError(
        f"a SelfDrafter runs over its target's keys and values, which has {expected}, and "
        f"{type(model.model).__name__} stores others, {found}; {advice}"
    )
