"""`find_route`: how a model is run over slots, found by trying.

HF is asked for the mask and the shapes of each layer, or shows them in its own cache. What is found
is believed after the self-test; what is chosen for speed and does not pass is given up, and says
so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from specdec.graphs.tree import modules_of
from specdec.hf.foreign import foreign_attention, foreign_masks, has_own_code
from specdec.hf.forward import cache_argument, device_of
from specdec.hf.layers import (
    IGNORED_ATTRIBUTES,
    INDEXED_LAYERS,
    WINDOWED_LAYERS,
    has_compressor,
    is_stateful,
)
from specdec.hf.lookups import attention_of, code_of
from specdec.hf.positions import position_limit
from specdec.hf.refusals import cause_of_refusal
from specdec.hf.versions import newer_than_tried
from specdec.slots.layout import KeyValueShape
from specdec.targets.attention import ATTENTION
from specdec.targets.edits.edit import Faster
from specdec.targets.families import FASTER, asked, families_of, has_quantised_weight
from specdec.targets.route import Route
from specdec.targets.trial.probe import PROBE, LearnedLayer
from specdec.targets.trial.self_test import compare
from specdec.targets.trial.witness import (
    PlainForwardError,
    Reading,
    is_same_reading,
    read_little,
    trial_texts,
)
from specdec.targets.views import open_view
from specdec.targets.watch import copied_values, structure
from specdec.targets.wrappers import refuse_joint_quantisation, remark_on_hooks, replaced_forwards
from specdec.torch_names import HOOKS_OF_ALL_MODULES, is_hook_table

if TYPE_CHECKING:
    from specdec.slots.spans import Chunk

_KNOWN: WeakKeyDictionary[PreTrainedModel, dict[bool | None, tuple]] = WeakKeyDictionary()
"""Of each model that was tried: (description, route), by `fuse`."""


def find_route(model: PreTrainedModel, *, fuse: bool | None = False, num_tokens: int = 0) -> Route:
    """The first way of running a model that reproduces its own plain forward, with all that makes
    it faster and does not break it. The same route as before, if nothing has changed since that
    decides the result.

    Args:
        model: an HF causal LM without wrappers.
        fuse: join products and compile pointwise work; see `Target`.
        num_tokens: of the longest text to come. Where somebody's own code runs in the model, texts
            of so many tokens and some more are tried.

    Raises:
        PlainForwardError: the model is loaded so that its plain forward leaves out a part of it.
        ValueError: none does; the message says what each of them ran into. Or quantised layers
            read tokens jointly.
    """
    limit, now = position_limit(model.config.get_text_config()), description(model)
    length = length_to_try(num_tokens, limit) if has_own_code(model) else 0
    before, route = _KNOWN.get(model, {}).get(fuse, (None, None))
    is_known = before == now and length <= route.num_tried
    if is_known and all(edit.fits(model) for edit in route.edits):
        return route
    refuse_joint_quantisation(model)
    route = _with_fewest_given_up(model, *_fastest(model, fuse), length)
    _KNOWN.setdefault(model, {})[fuse] = now, route
    return route


def _fastest(
    model: PreTrainedModel, fuse: bool | None
) -> tuple[tuple[Faster, ...], dict[str, str]]:
    """Every edit for speed that there is, and a note on each kind; the last is given up first."""
    if fuse is None:
        return (), {}
    own = {family.__name__.rpartition(".")[2]: family for family in families_of(model, FASTER)}
    experts = [own["experts"].StepExperts] if "experts" in own else []
    latents = [own["latents"].Latents] if "latents" in own else []
    fused: list[Any] = []
    if fuse:
        from specdec.targets.edits.fusion import Fusion
        from specdec.targets.edits.joint import JointProducts

        fused = [Fusion, JointProducts]
    found = {kind: kind.of(model) for kind in (*experts, *latents, *fused)}
    notes = {kind.__name__: note for kind, (_, note) in found.items() if note is not None}
    if not fuse and any(map(has_quantised_weight, model.modules())):
        from specdec.targets.edits.fusion import note_on_weights

        notes |= note_on_weights(model)
    edits = (found[kind][0] for kind in (*experts, *reversed(fused), *latents))
    return tuple(edit for edit in edits if edit is not None), notes


def _with_fewest_given_up(
    model: PreTrainedModel, edits: tuple[Faster, ...], notes: dict[str, str], length: int
) -> Route:
    """The first route that passes the self-test, with as many of the edits as pass; Raises as
    `find_route`.
    """
    while True:
        try:
            # Steps run in inference mode, and Dynamo would compile once more for another one.
            is_compiled = any(edit.is_compiled for edit in edits)
            with torch.inference_mode(is_compiled), torch.no_grad():
                return _passing(model, length, edits=edits, notes=notes)
        except ValueError as error:
            if not edits:
                raise
            *kept, given_up = edits
            edits = tuple(kept)
            notes = {**notes, type(given_up).__name__: f"{given_up.given_up}{error}"}
            given_up.undo(model)


FEW_TOKENS = 128
"""Of the texts that are tried first where somebody's own code runs in a model."""


def length_to_try(num_tokens: int, limit: int | None) -> int:
    """Tokens of the texts that are tried for texts of so many, and drafts behind them, in a model
    in which somebody's own code runs: it may act from some number of tokens on. Lengths double, so
    that few are tried.
    """
    least = max(FEW_TOKENS, num_tokens + FEW_TOKENS // 2)
    return min(1 << (least - 1).bit_length(), limit or least * 2)


def _passing(model: PreTrainedModel, length: int, **chosen: Any) -> Route:
    """The first route that passes the self-test with these fields, over texts of this length."""
    if foreign := foreign_masks(model):
        raise ValueError(
            f"{type(model).__name__} cannot be decoded over specdec's cache: its masks are made by "
            f"{foreign}, which is none of transformers' and which specdec's masks would replace. "
            "Use HF generate for this model, or an attention function that masks"
        )
    complaints, ways = [], (_through_attention_interface, _with_dense_mask)
    if foreign := foreign_attention(model):  # which specdec's would silently stand in for
        ways = (_with_dense_mask,)
        complaints = [f"its attention function {foreign} is none of transformers'"]
    for learn in ways:
        try:
            route = replace(learn(model), num_tried=length, **chosen)
            modules = [*route.attention_modules, *chain(*asked(model, "compared"))]
            notes = dict(chain(route.notes.items(), *asked(model, "notes")))
            route = replace(route, attention_modules=tuple(modules), notes=notes)
            complaint, route = compare(model, route)
        except PlainForwardError:
            raise
        except Exception as error:  # whatever a foreign model raises means: not this route
            complaint = f"{type(error).__name__}: {error}"
        if complaint is None:
            return route
        complaints.append(complaint)
    replaced = [f"{name or 'the model'}.forward" for name in replaced_forwards(model)]
    note = "; a function in the place of {} may call another model than a view of this one"
    raise ValueError(
        f"{type(model).__name__} cannot be decoded over specdec's cache{cause_of_refusal(model)} "
        f"({'; then '.join(dict.fromkeys(complaints))})"
        f"{note.format(replaced[0]) if replaced else ''}{remark_on_hooks(model)}"
        f"{newer_than_tried()}. Use HF generate for this model"
    )


def _through_attention_interface(model: PreTrainedModel) -> Route:
    """Asks HF for the mask of each layer."""
    learned: dict[int, LearnedLayer] = {}
    view = open_view(model, Route(PROBE))
    # A function, since hooks of accelerate's hand copies of dictionaries on.
    stored = stored_of(view, slot_window=learned.__setitem__)
    windows: dict[int, int | Chunk | None] = {}
    for layer, (mask, module, has_softcap) in learned.items():
        if has_softcap and attention_of(model.config.get_text_config()) == "sdpa":
            raise PlainForwardError(
                f"{type(model).__name__} caps its attention scores, which HF's sdpa leaves "
                "out; load it with attn_implementation='eager'"
            )
        device = device_of(module)
        found = (None,) if mask is None else mask.windows
        fitting = [w for w in found if mask is None or mask.is_causal_within(w, device)]
        if not fitting:
            raise ValueError(
                f"layer {layer} attends by a mask that is neither causal nor a sliding window nor "
                "chunks"
            )
        windows[layer] = fitting[0]
    for layer, kept in enumerate(DynamicCache(config=model.config.get_text_config()).layers):
        if getattr(kept, "is_sliding", False) and windows.get(layer, 0) is None:
            raise PlainForwardError(
                f"{type(model).__name__} sees the whole text in layer {layer}, but HF's cache "
                "forgets what lies before a sliding window, since its configuration names one: HF "
                "generate and HF's forward write other texts. Set config.sliding_window = None"
            )
    for layer, kind in _windowed_layers(model).items():
        if windows.get(layer) is None:
            raise ValueError(f"layer {layer} is {kind} but has no {WINDOWED_LAYERS[kind]}")
    modules = {id(module) for _, module, _ in learned.values()}
    names = tuple(name for name, module in view.named_modules() if id(module) in modules)
    route = Route(ATTENTION, windows, attention_modules=names, **stored)
    return _with_gates(model, route)


def _with_dense_mask(model: PreTrainedModel) -> Route:
    """For models that never call the interface."""
    config, sizes = model.config.get_text_config(), ("sliding_window", "attention_chunk_size")
    if _windowed_layers(model) or any(getattr(config, size, None) for size in sizes):
        raise ValueError("one dense mask cannot hold the windows of some layers")
    return _with_gates(model, Route(**stored_of(open_view(model, Route()))))


def stored_of(view: PreTrainedModel, **options: object) -> dict[str, Any]:
    """Fields of a `Route`: what the layers of a view store of a token, and what its mixers keep,
    seen in HF's own cache after a forward with these options.
    """
    kinds = set(getattr(view.config.get_text_config(), "layer_types", None) or ())
    is_compressed = any(map(has_compressor, view.modules()))
    has_state = is_stateful(view) and not is_compressed
    is_recurrent = has_state or not kinds <= {"full_attention", *INDEXED_LAYERS, *WINDOWED_LAYERS}
    is_indexed = not kinds.isdisjoint(INDEXED_LAYERS)
    has_own_layers = is_indexed or is_compressed
    cache = DynamicCache(config=view.config) if has_own_layers else DynamicCache()
    if is_recurrent:
        from specdec.targets.mixers import WatchedCache

        cache = WatchedCache(view)
    options[cache_argument(view)] = cache
    view(input_ids=trial_texts(view, 2), use_cache=True, **options)
    mixers = cache.mixers() if is_recurrent else {}
    if is_recurrent and not mixers:
        raise ValueError("its recurrent state does not go through HF's cache")
    shapes = {
        index: KeyValueShape(
            *(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]),
            *(torch.promote_types(layer.keys.dtype, layer.values.dtype), layer.keys.device),
        )
        for index, layer in enumerate(cache.layers)
        if getattr(layer, "keys", None) is not None
    }
    for others in asked(view, "stored", cache.layers):
        shapes |= others
    return {"shapes": shapes, "mixers": mixers}


def _with_gates(model: PreTrainedModel, route: Route) -> Route:
    """A route whose recurrent mixers have their gates."""
    if not route.mixers:
        return route
    from specdec.targets.mixers import with_closing_gates

    return with_closing_gates(model, route)


def _windowed_layers(model: PreTrainedModel) -> dict[int, str]:
    """Layers of which the configuration declares that they do not see the whole text, by kind."""
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return {i: kind for i, kind in enumerate(layer_types) if kind in WINDOWED_LAYERS}


def description(model: PreTrainedModel) -> tuple:
    """What decides the result of the self-test, to be compared with that of another moment: the
    modules with their settings, hooks and forwards, the configurations, functions that are looked
    up by name, adapters, the data type, device and shape of every tensor, and what somebody's own
    code makes of a few tokens. Values of weights decide nothing, since rounding is measured
    relative to them. Modules and hooks are referred to weakly, so that a
    description keeps no model alive.
    """
    modules = [(ref(m), *_settings(m)) for m in model.modules()]
    configs = {id(m.config): m.config for m in model.modules() if "config" in vars(m)}
    values = {number: copied_values(config) for number, config in configs.items()}
    functions = [*code_of(modules_of(model)), AttentionInterface()[ATTENTION]]
    everywhere = (hook for table in HOOKS_OF_ALL_MODULES for hook in table.values())
    code = [*map(_weakly, (*functions, *everywhere))]
    read = _Reading(read_little(model)) if has_own_code(model) else None
    tensors = [(t.dtype, t.device, t.shape) for t in (*model.parameters(), *model.buffers())]
    return modules, values, code, structure(model)[1], tensors, read


def _settings(module: nn.Module) -> tuple[dict, list]:
    """Plain values and tensors among a module's attributes; and its class, with its forward, its
    hooks and a forward in the place of it.
    """
    values, code = {}, [type(module), type(module).forward]
    for name, value in vars(module).items():
        if name in IGNORED_ATTRIBUTES:
            continue
        if isinstance(value, bool | int | float | str | None):
            values[name] = value
        elif isinstance(value, Tensor):
            values[name] = _Same(value)
        elif callable(value) and not isinstance(value, nn.Module):
            code.append(_weakly(value))
        elif is_hook_table(name) and isinstance(value, dict):
            code += map(_weakly, value.values())
    return values, code


@dataclass
class _Same:
    """Compares tensors as objects."""

    tensor: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.tensor is self.tensor


@dataclass(eq=False)
class _Reading:
    """Compares what was read up to rounding."""

    read: Reading

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reading) and is_same_reading(self.read, other.read)


def _weakly(value: object) -> object:
    """A reference that compares as the value itself; a strong one where no other is possible."""
    try:
        return ref(value)
    except TypeError:
        return value
