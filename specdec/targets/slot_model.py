"""`SlotModel`: an unmodified HF causal LM run over a `SlotCache`. `Target` is the one whose
distribution the output must have; a drafter that is itself an HF model is the other use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from specdec.arguments import check_integer
from specdec.graphs.tree import modules_of, weight_addresses
from specdec.hf.forward import device_of
from specdec.slots.cache import LAST, SlotCache
from specdec.slots.room import check_room
from specdec.targets.edits.edit import Edit, check_edits, name_of
from specdec.targets.forward import Views, forward, open_window
from specdec.targets.route import Route
from specdec.targets.watch import Surface, hooks_of, structure
from specdec.torch_names import pre_hooks_of
from specdec.types import Draft, FeatureLayer, TargetOutput

if TYPE_CHECKING:
    from specdec.targets.prompt_inputs import PromptChunk


class SlotModel:
    """Runs windows of tokens of an HF causal LM at given slots, each row with a length of its own.

    Args:
        model: a `PreTrainedModel`, decoder-only or with an encoder, with full, sliding-window or
            chunked attention, or recurrent layers, in eval mode.
        fuse: join products and compile pointwise work; see `Target`.
        edits: of the user; see `Target`.

    Attributes:
        model: the HF model, without wrappers.
        outer: what the user has handed over: the model, or what is around it.
        own_inputs: names of what a call may bring for PEFT's layers, and for cross attention.
        reads_source: it is the decoder of an encoder-decoder.
        fault_of_generate: why a call of the generator's own would write other text than `generate`
            of the model's class does; `None` for no reason. Through HF's hook it does not.
        route: how it is run, as its self-test found it: another object after each self-test.
        vocab_size: V of the logits.
        max_positions: longest sequence that the model has positions for; `None` for no limit.
        feature_layers: hidden states `0..L` or `"final"`, the hidden states that `forward` returns.
        layers: decoder layers that run, by index; `None` for all.
        hooks: dictionaries of hooks that were not empty when the model was tried, and copies.
        resolved: options of earlier calls, and what HF made of them (`resolve_once`).
        tried_windows: of calls, where `runs_users_code`; see `try_call`.
        num_handles: how many hooks torch had registered in this process then: where there were none
            in the model and this number is the same, there are none now.

    Raises:
        TypeError: not an HF model.
        ValueError: a model that cannot be decoded this way (a state outside of HF's
            cache, training mode, or one whose windowed forward does not reproduce
            its plain forward), with what to do instead.
    """

    def __init__(self, model: nn.Module, *, fuse: bool | None = False, edits: Sequence[Edit] = ()):
        from specdec.targets.wrappers import unwrap

        self.model, self._fuse, self.edits = unwrap(model), fuse, check_edits(edits)
        self.outer = model
        self.feature_layers: tuple[FeatureLayer, ...] = ()
        self.layers: tuple[int, ...] | None = None
        self.refresh()

    def refresh(self, *, num_tokens: int = 0) -> None:
        """Reads the model as it is now, self-test included: where weights were replaced, moved or
        cast, modules replaced, adapters switched or merged. Values that change in place need none.

        Args:
            num_tokens: of the longest text to come; see `find_route`.

        Raises:
            ValueError: the model can no longer be decoded. Nothing has been changed then.
        """
        from specdec.hf.positions import position_limit
        from specdec.targets.families import row_inputs_of
        from specdec.targets.trial.whole import try_model  # once per model

        model = self.model
        own = {"fuse": self._fuse, "edits": self.edits, "num_tokens": num_tokens}
        route, self.fault_of_generate = try_model(self.outer, model, **own)
        self.config = model.config.get_text_config()
        self.vocab_size: int = self.config.vocab_size
        self.max_positions = position_limit(self.config)
        self._structure, self._surface = structure(model), Surface(model)
        self.own_inputs = row_inputs_of(model)
        self.reads_source = hasattr(model, "reads_source")
        self.num_handles, self.hooks = RemovableHandle.next_id, hooks_of(modules_of(model))
        self._dtype = model.dtype
        self.route: Route = route
        self._tried_prompts: set[tuple[frozenset[str], frozenset[str]]] = set()  # by kinds
        self.tried_windows: set[tuple] = set()
        self.resolved: list[Any] = []
        self._uncut = 0, ""  # bytes and note of the prompts that took the most
        vars(self).pop("_prompt_views", None)
        if vars(self).pop("_views", None):
            _ = self._views

    @cached_property
    def _views(self) -> Views:
        """Opened with the first cache: later may be inside of a guard or a capture."""
        from specdec.targets.views import open_views

        return open_views(self.model, self.route, self.feature_layers, self.edits, self.layers)

    @property
    def step_view(self) -> PreTrainedModel:
        """The private view that steps run."""
        return self._views.step

    @cached_property
    def _prompt_views(self) -> Views:
        """Views that read prompts which are more than ids; no other call enters them."""
        from specdec.targets.edits.prompts import edit_prompts
        from specdec.targets.views import open_views

        route, edits = self._views.route, (*self.edits, edit_prompts)
        return open_views(self.model, route, self.feature_layers, edits, self.layers)

    @property
    def runs_users_code(self) -> bool:
        """Edits, hooks or other code of users run in its forwards."""
        return bool(self.edits or self.route.num_tried)

    @property
    def is_fused(self) -> bool:
        """Pointwise work is compiled."""
        return self.route.is_compiled

    @property
    def is_recurrent(self) -> bool:
        """Some of its layers keep a state that cannot be shortened; see `Memory`."""
        return bool(self.route.mixers)

    @property
    def why_reading_waits(self) -> str | None:
        """Why a forward of a prompt chunk makes the host wait; `None` if it does not."""
        return self.route.why_reading_waits

    @property
    def notes(self) -> tuple[str, ...]:
        """What was chosen for this model, and why, where there was a choice; what edits it; and
        what the largest prompts took that could not be read in chunks.
        """
        own = (f"edited by {', '.join(map(name_of, self.edits))}",) if self.edits else ()
        return (*self.route.notes.values(), *own, *filter(None, [self._uncut[1]]))

    def __getstate__(self) -> dict:
        left_out = "_views", "_prompt_views", "_surface", "hooks", "resolved"
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict) -> None:
        # A copied function still calls the first model.
        vars(self).update(state, _surface=None, hooks=[], resolved=[])

    @property
    def device(self) -> torch.device:
        """Where tokens go in: device of the embeddings, or where they are brought if offloaded."""
        return device_of(self.model.get_input_embeddings())

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self.model.dtype

    @property
    def num_layers(self) -> int:
        """Decoder layers L."""
        from specdec.hf.layers import decoder_layers

        return len(decoder_layers(self.model)[1])

    def check_unchanged(
        self,
        advice: str = "call generator.refresh(), or build the generator again",
        *,
        num_tokens: int = 0,
    ) -> None:
        """Raises `ValueError`, with what to do, if the model has other modules, another vocabulary,
        data type or mode than when it was wrapped, or would run under autocast.

        What else was changed meanwhile is followed, and the model tried once more: hooks, forwards
        that trainers and `torch.compile` replace, attributes, configurations, functions that are
        looked up by name. Where somebody's own code runs in the model, a few tokens are read by it,
        and longer texts tried before longer ones come.

        Args:
            advice: what to do about a change that is not supported.
            num_tokens: of the longest text to come.
        """
        name, views = type(self.model).__name__, vars(self).get("_views")
        (modules, adapters), (old_modules, old_adapters) = structure(self.model), self._structure
        layers, places = views.stored_anew if views else ((), ())
        change = None
        if self.model.dtype != self._dtype:
            change = f"was {self._dtype} when specdec wrapped it and is {self.model.dtype} now"
        elif modules != old_modules or self.config.vocab_size != self.vocab_size:
            change = "was edited after specdec wrapped it (a module replaced, added or resized)"
        elif adapters != old_adapters:
            change = "had its adapters switched, scaled or merged after specdec wrapped it"
        elif weight_addresses(*layers) != places:
            change = "had weights replaced or moved after specdec joined their products"
        if change:
            raise ValueError(f"{name} {change}; {advice}")
        if torch.is_autocast_enabled(self.device.type):
            from specdec.targets.wrappers import refuse_autocast

            refuse_autocast()
        if self.model.training:
            from specdec.targets.wrappers import refuse_training

            refuse_training(self.model)
        if any(map(pre_hooks_of, modules)):
            from specdec.targets.activation import refuse_adapters_by_row

            refuse_adapters_by_row(modules)
        is_long = self.route.num_tried and self._is_longer_than_tried(num_tokens)
        if self._surface is None or is_long or self._surface.has_changed(self.model):
            from specdec.targets.activation import without_activation

            with without_activation(modules):
                self.refresh(num_tokens=max(num_tokens, self.route.num_tried // 2))

    def _is_longer_than_tried(self, num_tokens: int) -> bool:
        """Whether somebody's own code in the model was tried with texts that are too short."""
        from specdec.targets.discovery import length_to_try

        return self.route.num_tried < length_to_try(num_tokens, self.max_positions)

    def refuse_own_generate(self) -> None:
        """Raises `ValueError` where calls of a generator's own would not write what `generate` of
        the model as it is now writes.
        """
        self.check_unchanged()
        if self.fault_of_generate:
            raise ValueError(self.fault_of_generate)

    def has_other_hooks(self) -> bool:
        """Whether hooks were registered or removed since the model was tried."""
        count = RemovableHandle.next_id
        if hooks_of(modules_of(self.model)) != self.hooks:
            return True
        self.num_handles = count  # others' hooks need not be looked at again
        return False

    def check_trees(self) -> None:
        """Raises `ValueError` for a model that takes chains only, since its forward over a tree is
        not the plain forward of each path.
        """
        self.route.check_trees(type(self.model).__name__)

    def check_reads_ahead(self) -> None:
        """Raises `ValueError` for a model that cannot be run behind the text for a drafter, since
        some of its layers keep a state that every token changes.
        """
        self.route.check_reads_ahead(type(self.model).__name__)

    def init_cache(
        self,
        batch_size: int,
        num_slots: int,
        *,
        max_window: int = 16,
        extra_slots: int | None = None,
    ) -> SlotCache:
        """Storage for rows of at most `num_slots` tokens; see `check_room`. Recurrent layers keep a
        window of at most `max_window` tokens. `extra_slots` as of `SlotCache`.
        """
        check_integer("batch_size", batch_size, 1)
        check_integer("num_slots", num_slots, 1)
        check_integer("max_window", max_window, 1)
        self.check_room(batch_size, num_slots, max_window=max_window)
        _ = self._views
        options = {"max_window": max_window, "extra_slots": extra_slots}
        return self.route.init_cache(batch_size, num_slots, **options)

    def check_room(self, batch_size: int, num_slots: int, *, max_window: int = 1) -> None:
        """Raises `ValueError` for a cache that no device here can hold."""
        others: Iterable = ()
        if self.route.mixers:
            from specdec.targets.edits.memory import row_bytes

            others = row_bytes(self.route.mixers, max_window)
        check_room(batch_size, num_slots, self.route.shapes, others)

    def forward(
        self, tokens: Tensor, cache: SlotCache, slots: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Logits and features of a window, see `forward.forward`; options are those of `Window`."""
        views, own = self._views, options.get("row_inputs", cache.row_inputs)
        if options.get("prompt") is not None or LAST in own:
            views = self._prompt_views
        return forward(views, tokens, cache, open_window(views, cache, slots, **options))

    def prefill(
        self,
        cache: SlotCache,
        tokens: Tensor,
        lengths: Tensor,
        *,
        offset: int | Tensor,
        prompt: PromptChunk | None = None,
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
            prompt: what is read in place of these ids, of `read_prompts`; its rows have lengths of
                their own, and the cache's row inputs those of it.

        Returns:
            Features `[B, C, F]`, or `None`.
        """
        cache.check_rows(tokens)
        if not isinstance(offset, Tensor):
            check_integer("offset", offset, 0)
        if prompt is not None:
            lengths = torch.tensor(prompt.lengths, device=tokens.device)
        positions = offset + torch.arange(tokens.shape[1], device=tokens.device)
        slots = torch.where(positions < lengths[:, None], positions, cache.padding_slot)
        tokens = tokens.clamp(0, self.vocab_size - 1)  # after a row's end there may be anything
        options = {"logits_to_keep": None, "is_chunk": True, "prompt": prompt}
        return self.forward(tokens, cache, slots, **options)[1]

    def verify(
        self,
        cache: SlotCache,
        start: Tensor,
        root: Tensor,
        draft: Draft,
    ) -> TargetOutput:
        """One forward over the root and the K draft tokens, a chain or a tree: nodes stand at
        positions by their depth, and see the text and their ancestors.

        Keys and values of the window are written, token after token; what is not accepted is
        garbage that the next window overwrites.

        Args:
            cache: rows to read.
            start: `[B]` position of the root.
            root: `[B]` the last committed token, not yet read by the target.
            draft: `[B, K]` tokens of the target's vocabulary.

        Returns:
            Logits `[B, K + 1, V]` and features.
        """
        cache.check_rows(draft.tokens)
        tokens = torch.cat([root[:, None], draft.tokens], dim=1)  # [B, N]
        slots = start[:, None] + torch.arange(tokens.shape[1], device=start.device)
        tree = {}
        if not draft.is_chain:  # of a chain slots say where tokens stand and what they see
            tree = {"positions": start[:, None] + draft.depths, "visible": draft.ancestors}
        return TargetOutput(*self.forward(tokens, cache, slots, **tree))
