"""`SlotModel`: an unmodified HF causal LM run over a `SlotCache`. `Target` is the one whose
distribution the output must have; a drafter that is itself an HF model is the other use.

What runs is a private view of the model (view.py), so the model itself is never changed: it may be
called, by anybody and from any thread, while specdec generates with it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.arguments import check_choice, check_integer, shown
from specdec.hf import ATTENTION_FIELD, cache_argument, set_implementation
from specdec.target.attention import ATTENTION, window_mask
from specdec.target.cache import Chunk, SlotCache, Window, check_room, memory_of
from specdec.target.experts import set_experts, step_experts
from specdec.target.features import FeatureLayer, Features, catch_features, decoder_layers
from specdec.target.fusion import Fusion, note_on_weights
from specdec.target.joint import (
    Group,
    JointProduct,
    addresses,
    join_weights,
    separate_weights,
    siblings,
)
from specdec.target.memory import remember
from specdec.target.self_test import Route, description, find_route
from specdec.target.view import private_view, replaced_forwards, structure, wrap_forward
from specdec.target.wrappers import (
    refuse_adapters_by_row,
    refuse_training,
    refuse_unsupported,
    unwrap,
)
from specdec.types import Draft, TargetOutput

MAX_VOCAB_PADDING = 1024
"""Vocabularies that share a tokenizer differ by the padding of their embedding tables, at most by
this, and at most by an eighth of the larger one.
"""


@dataclass(eq=False)
class Choices:
    """How a model is run, as its self-test found it: the implementation of experts inside a step
    (`None` for the model's own), what compiles pointwise work, linear layers that are one product,
    a note on each choice that there was, and the self-test's route.
    """

    experts: str | None
    fusion: Fusion | None
    joined: list[Group]
    notes: dict[str, str]
    route: Route | None = None


class Views(NamedTuple):
    """Private views of a model, for windows of steps and for chunks of prompts, and the addresses
    of the joined parameters.
    """

    step: PreTrainedModel
    chunk: PreTrainedModel
    addresses: list[int]


_KNOWN: WeakKeyDictionary[PreTrainedModel, dict[bool, tuple]] = WeakKeyDictionary()
"""Of each model that was tried: (description, choices), without and with `fuse`."""


class SlotModel:
    """Runs windows of tokens of an HF causal LM at given slots, each row with a length of its own.

    Args:
        model: a decoder-only `PreTrainedModel` with full, sliding-window or chunked attention, or
            recurrent layers, in eval mode.
        fuse: join products and compile pointwise work; see `Target`.

    Attributes:
        model: the HF model, without wrappers.
        vocab_size: V of the logits.
        max_positions: longest sequence that the model has positions for; `None` for no limit.
        feature_layers: boundaries `0..L` or `"final"`, the hidden states that `forward` returns.

    Raises:
        TypeError: not an HF model.
        ValueError: a model that cannot be decoded this way (a state outside of HF's
            cache, encoder-decoder, training mode, or one whose windowed forward does not reproduce
            its plain forward), with what to do instead.
    """

    def __init__(self, model: PreTrainedModel, *, fuse: bool = False):
        model = unwrap(model)
        refuse_unsupported(model)
        refuse_training(model)
        self.model = model
        self.config = model.config.get_text_config()
        self.vocab_size: int = self.config.vocab_size
        self.max_positions = _position_limit(self.config)
        parameters = inspect.signature(type(model).forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._cache_name = cache_argument(model)
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self.feature_layers: tuple[FeatureLayer, ...] = ()
        self.skipped_layers: tuple[int, ...] = ()
        self._structure, self._forwards = structure(model), replaced_forwards(model)
        self._dtype, self._fuse = model.dtype, fuse
        self._choices = self._known_choices(fuse) or self._tried_choices(fuse)

    def _known_choices(self, fuse: bool) -> Choices | None:
        """Of an earlier self-test of this model, if nothing has changed that decides its result."""
        before, choices = _KNOWN.get(self.model, {}).get(fuse, (None, None))
        if before is None or before != description(self.model):
            return None
        if choices.joined and siblings(self.model)[0] != choices.joined:
            return None
        return choices

    def _tried_choices(self, fuse: bool) -> Choices:
        """As the self-test finds them; what breaks the model of all that is chosen for speed is
        given up.
        """
        experts, note = step_experts(self.model)
        choices = self._choices = Choices(
            experts, None, [], {} if note is None else {"experts": note}
        )
        choices.notes |= {} if fuse else note_on_weights(self.model)
        before = description(self.model)
        if fuse:
            choices.fusion = Fusion()
            kinds = choices.fusion.fuse(private_view(self.model), {})
            choices.notes["fusion"] = f"pointwise work is fused in {', '.join(kinds)}"
            if not kinds:
                choices.fusion = None
                nothing = "no norm, gated MLP or rotary embedding recognised"
                choices.notes["fusion"] = f"pointwise work is not fused: {nothing}"
            choices.joined, choices.notes["joined"] = siblings(self.model)
            join_weights(self.model, choices.joined)
        while choices.route is None:
            try:
                # Steps run in inference mode, and Dynamo would compile once more for another one.
                with torch.inference_mode(choices.fusion is not None):
                    choices.route = find_route(self)
            except ValueError as error:
                if not self._gives_up_one(error):
                    raise
        _KNOWN.setdefault(self.model, {})[fuse] = before, choices
        return choices

    def _gives_up_one(self, error: ValueError) -> bool:
        """Whether there was a choice left to go without."""
        choices = self._choices
        if choices.fusion is not None:
            choices.fusion = None
            choices.notes["fusion"] = f"pointwise work is not fused: {error}"
        elif choices.joined:
            separate_weights(self.model, choices.joined)
            choices.joined = []
            choices.notes["joined"] = f"products are not joined: {error}"
        elif choices.experts is not None:
            note = f"experts are the model's own: with {choices.experts}, {error}"
            choices.experts, choices.notes["experts"] = None, note
        else:
            return False
        return True

    @property
    def is_fused(self) -> bool:
        """Pointwise work is compiled."""
        return self._choices.fusion is not None

    @property
    def is_recurrent(self) -> bool:
        """Some of its layers keep a state that cannot be shortened; see `Memory`."""
        return bool(self._choices.route.mixers)

    @property
    def why_reading_waits(self) -> str | None:
        """Why a forward of a prompt chunk makes the host wait; `None` if it does not."""
        has_own = self._choices.experts is not None
        return "the experts' own code waits for the device" if has_own else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What was chosen for this model, and why, where there was a choice."""
        return tuple(self._choices.notes.values())

    @cached_property
    def _views(self) -> Views:
        """Opened with the first cache: later may be inside of a guard or a capture."""
        attention, choices = self._choices.route.attention, self._choices
        join_weights(self.model, choices.joined)  # they may have been moved since the self-test
        step = self.open_view(attention, for_steps=True)
        chunk = step if choices.experts is None else self.open_view(attention, is_fast=True)
        return Views(step, chunk, addresses(self.model, choices.joined))

    def open_view(
        self, attention: str | None, *, is_fast: bool = False, for_steps: bool = False
    ) -> PreTrainedModel:
        """A private view of the model.

        Args:
            attention: name of its attention function; `None` for the model's own.
            is_fast: with joined products and compiled pointwise work.
            for_steps: the same, and the experts that are chosen for the few tokens of a step.
        """
        view = private_view(self.model)
        # Sub-models can own configurations of their own (a text model inside a multimodal one).
        for module in view.modules():
            module.training = False
            fields = vars(module.config) if isinstance(module, PreTrainedModel) else {}
            if "pad_token_id" in fields:
                # With an id for padding GPT-2 searches its input for it: the host would wait.
                fields["pad_token_id"] = None
            if attention is not None and fields:
                set_implementation(module.config, ATTENTION_FIELD, attention)
            if attention == ATTENTION and getattr(module, "attn_temperature_tuning", False):
                # Llama 4's own is of positions that count from one length for all rows.
                module.attn_temperature_tuning = False
                module.tempers_queries = not module.use_rope
        if for_steps and self._choices.experts is not None:
            set_experts(view, self._choices.experts)
        if is_fast or for_steps:
            self._speed_up(view)
        if self._choices.route is not None:
            remember(view, self._choices.route.mixers, memory_of)
        for layer in self.skipped_layers:
            wrap_forward(decoder_layers(view, self.num_layers)[1][layer], _hand_on)
        if self.feature_layers:
            catch_features(view, self.num_layers, self.feature_layers, _features_of_window)
        return view

    def _speed_up(self, view: PreTrainedModel) -> None:
        """Joins the products of a view, and compiles its pointwise work."""
        products = {group: JointProduct(view, group) for group in self._choices.joined}
        if self._choices.fusion is not None:
            self._choices.fusion.fuse(view, products)
        for group, product in products.items():
            product.install(view, group)

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_views"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, _forwards={})  # a copied function still calls the first model
        join_weights(self.model, self._choices.joined)  # a copy has storage of its own

    @property
    def device(self) -> torch.device:
        """Device of the embeddings, where tokens go in."""
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self.model.dtype

    @property
    def num_layers(self) -> int:
        """Decoder layers L."""
        return self.config.num_hidden_layers

    @property
    def choices(self) -> Choices:
        """How the model is run: another object after each self-test."""
        return self._choices

    def check_unchanged(self, advice: str = "build the generator again") -> None:
        """Raises `ValueError`, with what to do, if the model has other modules, another vocabulary,
        data type or mode than when it was wrapped, or would run under autocast.

        Forwards that were replaced meanwhile, as trainers and `torch.compile` do, are followed: the
        model is tried once more.
        """
        name, views = type(self.model).__name__, vars(self).get("_views")
        (modules, adapters), (old_modules, old_adapters) = structure(self.model), self._structure
        joined, change = self._choices.joined, None
        if self.model.dtype != self._dtype:
            change = f"was {self._dtype} when specdec wrapped it and is {self.model.dtype} now"
        elif modules != old_modules or self.config.vocab_size != self.vocab_size:
            change = "was edited after specdec wrapped it (a module replaced, added or resized)"
        elif adapters != old_adapters:
            change = "had its adapters switched or merged after specdec wrapped it"
        elif joined and views and addresses(self.model, joined) != views.addresses:
            change = "had weights replaced or moved after specdec joined their products"
        if change:
            raise ValueError(f"{name} {change}; {advice}")
        if torch.is_autocast_enabled(self.model.device.type):
            raise ValueError(
                "generation does not run under torch.autocast, which changes data types inside the "
                "model; load it in the data type that you want and leave the autocast block"
            )
        refuse_training(self.model)
        refuse_adapters_by_row(self.model)
        if replaced_forwards(self.model) != self._forwards:
            other = SlotModel(self.model, fuse=self._fuse)
            self._choices, self._forwards = other._choices, other._forwards
            vars(self).pop("_views", None)

    def check_trees(self) -> None:
        """Raises `ValueError` for a model that takes chains only, since its forward over a tree is
        not the plain forward of each path.
        """
        if fault := self._choices.route.fault_of_trees:
            raise ValueError(
                f"{type(self.model).__name__} cannot read the window of a tree ({fault}); use a "
                "drafter of chains (tree=None)"
            )

    def check_reads_ahead(self) -> None:
        """Raises `ValueError` for a model that cannot be run behind the text for a drafter, since
        some of its layers keep a state that every token changes.
        """
        if self.is_recurrent:
            names = ", ".join(list(self._choices.route.mixers)[:3])
            raise ValueError(
                f"{type(self.model).__name__} keeps a recurrent state ({names}), which no drafter "
                "can read ahead from; use a drafter with reads_target = False"
            )

    def init_cache(self, batch_size: int, num_slots: int, *, max_window: int = 16) -> SlotCache:
        """Storage for rows of at most `num_slots` tokens; see `check_room`. Recurrent layers keep a
        window of at most `max_window` tokens.
        """
        check_integer("batch_size", batch_size, 1)
        check_integer("num_slots", num_slots, 1)
        check_integer("max_window", max_window, 1)
        self.check_room(batch_size, num_slots, max_window=max_window)
        _ = self._views
        route = self._choices.route
        options = {"mixers": route.mixers, "max_window": max_window}
        return SlotCache(batch_size, num_slots, route.shapes, **options)

    def check_room(self, batch_size: int, num_slots: int, *, max_window: int = 1) -> None:
        """Raises `ValueError` for a cache that no device here can hold."""
        route = self._choices.route
        options = {"mixers": route.mixers, "max_window": max_window}
        check_room(batch_size, num_slots, route.shapes, **options)

    def forward(
        self,
        tokens: Tensor,
        cache: SlotCache,
        slots: Tensor,
        *,
        num_attended: int,
        positions: Tensor | None = None,
        visible: Tensor | None = None,
        logits_to_keep: int = 0,
        is_chunk: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """One forward of a window; keys and values are written at `slots`.

        Args:
            tokens: `[B, N]` int64 ids of the vocabulary.
            cache: the rows' storage.
            slots: `[B, N]` int64, slot of each token; `cache.trash` for tokens to forget.
            num_attended: host upper bound of the largest real slot, plus 1.
            positions, visible: see `Window`; by default those of a chain.
            logits_to_keep: compute logits of the last so many tokens only; 0 for all of them.
            is_chunk: of a prompt: many tokens.

        Returns:
            Logits `[B, N or logits_to_keep, V]`, and features `[B, N, F]` side by side in the order
            of `feature_layers`, on the device of the embeddings; `None` where none are wanted.
        """
        route, views = self._choices.route, self._views
        window = cache.open_window(
            slots,
            num_attended=num_attended,
            positions=positions,
            visible=visible,
            layer_windows=route.layer_windows,
            is_chunk=is_chunk,
        )
        view = views.chunk if is_chunk else views.step
        logits = self.run(view, route.attention, window, tokens, cache, logits_to_keep)
        if not self.feature_layers:
            return logits, None
        caught = [window.features[layer].to(tokens.device) for layer in self.feature_layers]
        return logits, torch.cat(caught, dim=-1)

    def run(
        self,
        view: PreTrainedModel,
        attention: str | None,
        window: Window,
        tokens: Tensor,
        cache: SlotCache,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Logits of one forward of a view over an open window; Args as `forward` and `open_view`.

        Without an attention function of specdec's the view gets a dense mask: so run models that
        never call HF's attention interface but pass a 4-D mask through.
        """
        inputs = {"input_ids": tokens, self._cache_name: cache, "use_cache": True}
        if self._takes_positions:
            # Tokens at or beyond the last position will be forgotten.
            positions = window.slots if window.positions is None else window.positions
            limit = self.max_positions
            fits = limit is None or cache.trash < limit
            inputs["position_ids"] = positions if fits else positions.clamp(max=limit - 1)
        if self._takes_logits_to_keep:
            inputs["logits_to_keep"] = logits_to_keep
        if attention is None:
            mask = window_mask(window, tokens.shape[1], self.dtype)
            logits = view(**inputs, attention_mask=mask).logits
        else:
            logits = view(**inputs, slot_window=window).logits
        if not self._takes_logits_to_keep and logits_to_keep:
            logits = logits[:, -logits_to_keep:]
        return logits


class Target(SlotModel):
    """Wraps an unmodified HF causal LM for prefill and verification.

    A target holds no state of a generation: the rows' keys and values live in the `SlotCache` that
    is passed in, and their lengths with the caller, so one target serves any number of generations
    at a time, in any number of threads.

    Args:
        model: a decoder-only HF model in eval mode.
        feature_layers: which hidden states to return as features: boundary `b` is the residual
            stream after b decoder layers (0: embeddings), `"final"` the state after the final norm.
            Normally set by the drafter's needs.
        fuse: all that makes a step faster and changes no more than rounding. Products of q, k, v
            and of gate, up become one product each: their parameters, still the model's own, become
            views of one buffer each. The small work between products (norms, rotary embeddings,
            gated activations) is compiled with Inductor, which takes some seconds at first, and
            int8 and float8 weights of torchao's are multiplied as they are. The self-test holds
            all to its limits, and `notes` says what was done and what was not.

    Raises:
        TypeError: `model` is not an HF model.
        ValueError: the model cannot be decoded this way, or a feature layer does not exist.

    Example:
        >>> from specdec import Target, zoo
        >>> from specdec.types import Draft
        >>> target = Target(zoo.load_target())
        >>> cache, text = target.init_cache(batch_size=1, num_slots=32), torch.tensor([[5, 6, 7]])
        >>> target.prefill(cache, text, torch.tensor([2]), offset=0)
        >>> nothing = Draft(text[:, :0])
        >>> out = target.verify(cache, torch.tensor([2]), text[:, 2], nothing, num_attended=3)
        >>> out.logits.shape
        torch.Size([1, 1, 2048])
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        feature_layers: tuple[FeatureLayer, ...] = (),
        fuse: bool = False,
    ):
        super().__init__(model, fuse=check_choice("fuse", fuse, (True, False)))
        self.feature_layers = self._checked(feature_layers)

    def with_features(self, feature_layers: tuple[FeatureLayer, ...]) -> Target:
        """A target over the same model that returns the given features.

        Raises:
            ValueError: a feature layer does not exist.
        """
        other = copy.copy(self)
        other.feature_layers = self._checked(feature_layers)
        return other

    def _checked(self, feature_layers: Sequence[FeatureLayer]) -> tuple[FeatureLayer, ...]:
        if not isinstance(feature_layers, tuple | list):
            got = f"got {shown(feature_layers)}"
            raise TypeError(f"feature_layers must be a tuple, {got}; boundaries, or 'final'")
        for layer in feature_layers:
            is_boundary = type(layer) is int and 0 <= layer <= self.num_layers
            if layer != "final" and not is_boundary:
                raise ValueError(
                    f"feature layer {layer!r} does not exist: expected 'final' or a boundary "
                    f"0..{self.num_layers}"
                )
        return tuple(feature_layers)

    def part(self, layers: Sequence[int]) -> Target:
        """A target that runs some of the decoder layers, then the final norm and the vocabulary
        head, over the same cache: what a drafter runs behind the text.

        Args:
            layers: indices of those that run; a layer left out hands on what it was given.

        Raises:
            ValueError: a layer that does not exist.
        """
        for layer in layers:
            check_integer("layers", layer, 0, self.num_layers - 1)
        other = copy.copy(self)
        other.skipped_layers = tuple(i for i in range(self.num_layers) if i not in layers)
        return other

    @property
    def layer_windows(self) -> Mapping[int, int | Chunk | None]:
        """Sliding window of each attention layer, in positions, or its `Chunk`; `None` for full
        attention.
        """
        return self._choices.route.layer_windows

    @property
    def feature_width(self) -> int:
        """Width F of the features, 0 when there are none."""
        return len(self.feature_layers) * self.config.hidden_size

    def prefill(
        self,
        cache: SlotCache,
        tokens: Tensor,
        lengths: Tensor,
        *,
        offset: int | Tensor,
        num_attended: int | None = None,
    ) -> Tensor | None:
        """Reads one chunk of the prompts; rows shorter than the chunk write nothing.

        No logits come back: the last prompt token is left to the first `verify`, so the first
        generated token is produced exactly as every other one.

        Args:
            cache: rows to extend.
            tokens: `[B, C]` prompt tokens of positions `offset..offset + C - 1`.
            lengths: `[B]` how many tokens of each prompt to read in all; positions at or beyond it
                are skipped.
            offset: position of the chunk's first token; a tensor `[]` where it is on the device.
            num_attended: host upper bound of the positions in use, the chunk's included; `None` is
                `offset + C`.

        Returns:
            Features `[B, C, F]`, or `None`.
        """
        cache.check_rows(tokens)
        if num_attended is None:
            num_attended = check_integer("offset", offset, 0) + tokens.shape[1]
        positions = offset + torch.arange(tokens.shape[1], device=tokens.device)
        slots = torch.where(positions < lengths[:, None], positions, cache.trash)
        tokens = tokens.clamp(0, self.vocab_size - 1)  # after a row's end there may be anything
        _, features = self.forward(
            tokens, cache, slots, num_attended=num_attended, logits_to_keep=1, is_chunk=True
        )
        return features

    def verify(
        self, cache: SlotCache, start: Tensor, anchor: Tensor, draft: Draft, *, num_attended: int
    ) -> TargetOutput:
        """One forward over the anchor and the K draft tokens, a chain or a tree: nodes stand at
        positions by their depth, and see the text and their ancestors.

        Keys and values of the window are written, token after token; what is not accepted is
        garbage that the next window overwrites.

        Args:
            cache: rows to read.
            start: `[B]` position of the anchor.
            anchor: `[B]` the last committed token, not yet read by the target.
            draft: `[B, K]` tokens of the target's vocabulary.
            num_attended: host upper bound of the positions in use, the window's included:
                `max(start) + 1 + K` or more. It is believed, since `start` is on the device; with a
                smaller number slots in use are not attended, and the logits are wrong.

        Returns:
            Logits `[B, K + 1, V]` and features.
        """
        cache.check_rows(draft.tokens)
        tokens = torch.cat([anchor[:, None], draft.tokens], dim=1)  # [B, N]
        slots = start[:, None] + torch.arange(tokens.shape[1], device=start.device)
        tree = {}
        if draft.parents is not None:
            tree = {"positions": start[:, None] + draft.depths, "visible": draft.ancestors}
        return TargetOutput(*self.forward(tokens, cache, slots, num_attended=num_attended, **tree))


def _hand_on(forward: Callable, *args, **kwargs) -> Tensor:
    """In place of a decoder layer: its input."""
    return args[0] if args else kwargs["hidden_states"]


def _features_of_window(args: tuple, kwargs: dict) -> Features:
    """Where the features of a forward go, given the arguments of a decoder layer: every layer is
    handed the cache.
    """
    cache = next(v for v in (*args, *kwargs.values()) if isinstance(v, SlotCache))
    return cache.window.features


def _position_limit(config: PreTrainedConfig) -> int | None:
    """Positions that the model can be given.

    Rotary scalings that look at the longest position of a forward ("longrope", "dynamic") change
    every position's angle once it passes the original range. Plain decoding switches in mid-text; a
    batch of drafts cannot, so such models are served within that range.
    """
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    rope = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in (rope, *per_layer_type):
        if parameters.get("rope_type") in ("longrope", "dynamic"):
            original = parameters.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(limit, original or limit)
    return limit
