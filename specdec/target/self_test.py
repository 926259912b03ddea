"""The self-test: an HF model is accepted only if windows over a cache of garbage reproduce its own
plain forward.

An architecture may apply masks, biases and positions anywhere. So a model is run twice, plainly and
in ragged windows, and compared layer by layer. In the windowed run each layer is given what it was
given in the plain run. A difference is then that layer's own, and rounding does not accumulate over
layers until it hides a wrong mask in one of them. The tolerance is measured rounding: how far the
same layer, given the same input, differs between two attention implementations of HF.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specdec.graphs.tree import fill, tables
from specdec.hf import WINDOWED_LAYERS, cache_argument, newer_than_tried
from specdec.target.attention import ATTENTION, PROBE, LearnedLayer
from specdec.target.cache import Chunk, KeyValueShape, SlotCache, memory_of
from specdec.target.features import decoder_layers
from specdec.target.memory import MixerPlan, WatchedCache, remember, with_gates
from specdec.target.view import adapters_of, replaced_forwards, wrap_forward
from specdec.target.wrappers import refuse_joint_quantisation

NOISE_FACTOR = 4.0
"""A part of a model may differ by so many times its measured rounding."""
LONGEST_WINDOW = 64
"""Sliding windows and chunks of up to so many tokens are exceeded by the texts of the trial."""


class OverSlots(Protocol):
    """What is tested: a model that runs over slots (`target.hf_model.SlotModel`)."""

    model: PreTrainedModel
    config: PreTrainedConfig
    num_layers: int

    def open_view(self, attention: str | None, **options: Any) -> PreTrainedModel:
        """A private view of the model."""

    def run(self, view: PreTrainedModel, attention: str | None, *args: Any) -> Tensor:
        """Logits of one forward of a view over an open window."""


class LeftOutError(ValueError):
    """HF's own forward, as the model was loaded, leaves out a part of the model."""


def description(model: PreTrainedModel) -> tuple:
    """What decides the result of the self-test, to be compared with that of another moment: the
    modules with their settings, hooks and replaced forwards, the configurations, the attention
    functions, adapters, and the data type, device and shape of every tensor. Values of weights
    decide nothing, since rounding is measured relative to them. Modules and hooks are referred to
    weakly, so that a description keeps no model alive.
    """
    modules = [(ref(m), *_settings(m)) for m in model.modules()]
    configs = {id(m.config): m.config for m in model.modules() if "config" in vars(m)}
    names = {c._attn_implementation for c in configs.values() if isinstance(c, PreTrainedConfig)}
    functions = {n: _weakly(ALL_ATTENTION_FUNCTIONS.get(n)) for n in (*names, ATTENTION)}
    tensors = [(t.dtype, t.device, t.shape) for t in (*model.parameters(), *model.buffers())]
    return modules, copy.deepcopy(configs), functions, adapters_of(model), tensors


def _settings(module: nn.Module) -> tuple[dict, list]:
    """Plain values among a module's attributes, and its hooks and replaced forward."""
    values, code = {}, []
    for name, value in vars(module).items():
        if name == "training":  # views are in evaluation mode
            continue
        if isinstance(value, bool | int | float | str | None):
            values[name] = value
        elif name == "forward":
            code.append(_weakly(value))
        elif "_hooks" in name and isinstance(value, dict):
            code += map(_weakly, value.values())
    return values, code


def _weakly(value: object) -> object:
    """A reference that compares as the value itself; a strong one where no other is possible."""
    try:
        return ref(value)
    except TypeError:
        return value


class Route(NamedTuple):
    """How a model is run over slots: the name of the attention function, or `None` for a dense
    mask; the window of each layer, `None` for full attention; what each layer stores of a token;
    the names of the modules that call the attention function; its recurrent mixers by name; what it
    does wrong in the window of a tree, `None` for nothing.
    """

    attention: str | None
    layer_windows: dict[int, int | Chunk | None]
    shapes: dict[int, KeyValueShape]
    attention_modules: tuple[str, ...]
    mixers: Mapping[str, MixerPlan] = {}
    fault_of_trees: str | None = None

    @property
    def compared_modules(self) -> tuple[str, ...]:
        """Modules whose output, before the residual stream is added, is compared too."""
        return *self.attention_modules, *self.mixers


@torch.no_grad()
def find_route(model: OverSlots) -> Route:
    """The first way of running a model that reproduces its own plain forward.

    Raises:
        LeftOutError: the model is loaded so that its plain forward leaves out a part of it.
        ValueError: none does; the message says what each of them ran into. Or quantised layers
            read tokens jointly.
    """
    refuse_joint_quantisation(model.model)
    complaints = []
    for learn in (_through_attention_interface, _with_dense_mask):
        try:
            route = learn(model)
            complaint, of_trees = _complaints(model, route)
        except LeftOutError:
            raise
        except Exception as error:  # whatever a foreign model raises means: not this route
            complaint = f"{type(error).__name__}: {error}"
        if complaint is None:
            return route._replace(fault_of_trees=of_trees)
        complaints.append(complaint)
    replaced = [f"{name or 'the model'}.forward" for name in replaced_forwards(model.model)]
    note = "; a function in the place of {} may call another model than a view of this one"
    raise ValueError(
        f"{type(model.model).__name__} cannot be decoded over specdec's cache "
        f"({'; then '.join(complaints)}){note.format(replaced[0]) if replaced else ''}"
        f"{newer_than_tried()}. Use HF generate for this model"
    )


def _through_attention_interface(model: OverSlots) -> Route:
    """Asks HF for the mask of each layer."""
    learned: dict[int, LearnedLayer] = {}
    view = model.open_view(PROBE)
    shapes, mixers = _stored_shapes(model, view, slot_window=learned)
    windows: dict[int, int | Chunk | None] = {}
    for layer, (mask, module, has_softcap) in learned.items():
        if has_softcap and model.config._attn_implementation == "sdpa":
            raise LeftOutError(
                f"{type(model.model).__name__} caps its attention scores, which HF's sdpa leaves "
                "out; load it with attn_implementation='eager'"
            )
        device = next((p.device for p in module.parameters()), None)
        found = (None,) if mask is None else mask.windows
        fitting = [w for w in found if mask is None or mask.is_causal_within(w, device)]
        if not fitting:
            raise ValueError(
                f"layer {layer} attends by a mask that is neither causal nor a sliding window nor "
                "chunks"
            )
        windows[layer] = fitting[0]
    for layer, kind in _windowed_layers(model).items():
        if windows.get(layer) is None:
            raise ValueError(f"layer {layer} is {kind} but has no {WINDOWED_LAYERS[kind]}")
    modules = {id(module) for _, module, _ in learned.values()}
    names = tuple(name for name, module in view.named_modules() if id(module) in modules)
    return _closing(model, Route(ATTENTION, windows, shapes, names, mixers))


def _with_dense_mask(model: OverSlots) -> Route:
    """For models that never call the interface."""
    sizes = ("sliding_window", "attention_chunk_size")
    if _windowed_layers(model) or any(getattr(model.config, size, None) for size in sizes):
        raise ValueError("one dense mask cannot hold the windows of some layers")
    shapes, mixers = _stored_shapes(model, model.open_view(None))
    return _closing(model, Route(None, {}, shapes, (), mixers))


def _stored_shapes(
    model: OverSlots, view: PreTrainedModel, **options: object
) -> tuple[dict[int, KeyValueShape], dict[str, MixerPlan]]:
    """What the layers of a view store of a token, and what its mixers keep, seen in HF's own cache
    after a forward.
    """
    kinds = set(getattr(model.config, "layer_types", None) or ())
    is_stateful = getattr(model.model, "_is_stateful", False)
    is_recurrent = is_stateful or not kinds <= {"full_attention", *WINDOWED_LAYERS}
    cache = WatchedCache(view) if is_recurrent else DynamicCache()
    options[cache_argument(model.model)] = cache
    view(input_ids=_tokens(model, 2), use_cache=True, **options)
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
    return shapes, mixers


def _closing(model: OverSlots, route: Route) -> Route:
    """The route with the gates of its mixers; without those of a mixer where none are found."""
    tried = {n: with_gates(p, model.model.get_submodule(n)) for n, p in route.mixers.items()}
    chosen = {name: next(plans) for name, plans in tried.items()}
    while True:
        closed = _closed(model, route, chosen)
        left = [n for n, plan in chosen.items() if plan.gates is not None and n not in closed]
        if not left:
            return route._replace(mixers=chosen)
        chosen |= {name: next(tried[name]) for name in left}


def _closed(model: OverSlots, route: Route, mixers: dict[str, MixerPlan]) -> list[str]:
    """Mixers whose states, of any values, a replay with all gates closed leaves as they are."""
    if not mixers:
        return []
    view = model.open_view(route.attention)
    remember(view, mixers, memory_of)
    cache = SlotCache(2, 16, route.shapes, mixers=mixers, max_window=3)
    for tensor in tables(cache.memory).values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))
    cache.memory.count.fill_(3)
    before = {place: state.clone() for place, state in cache.memory.states.items()}
    slots = torch.arange(3, device=model.device).expand(2, -1)
    window = cache.open_window(slots, num_attended=3, layer_windows=route.layer_windows)
    model.run(view, route.attention, window, _tokens(model, 3), cache)
    after = cache.memory.states
    return [
        name
        for name, plan in mixers.items()
        if all(torch.allclose(after[p], before[p], atol=1e-5) for p in plan.states)
    ]


def _windowed_layers(model: OverSlots) -> dict[int, str]:
    """Layers of which the configuration declares that they do not see the whole text, by kind."""
    layer_types = getattr(model.config, "layer_types", None) or ()
    return {i: kind for i, kind in enumerate(layer_types) if kind in WINDOWED_LAYERS}


def _tokens(model: OverSlots, length: int) -> Tensor:
    """Two texts `[2, length]`."""
    return (torch.arange(2 * length, device=model.device).view(2, -1) * 7 + 1) % model.vocab_size


class _Trace:
    """What went through the decoder layers and some modules of a private view in one forward,
    each `[2, N, ...]`. Inputs that are `given` replace those of the decoder layers.
    """

    def __init__(self, view: PreTrainedModel, num_layers: int, modules: tuple[str, ...]):
        self.given: list[Tensor] | None = None
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        for i, layer in enumerate(decoder_layers(view, num_layers)[1]):
            wrap_forward(layer, partial(self._run_layer, i))
        for name in modules:
            wrap_forward(view.get_submodule(name), partial(self._watch, name))

    def _run_layer(self, index: int, forward: Callable, *args, **kwargs):
        self.inputs[index] = args[0] if args else kwargs["hidden_states"]
        if self.given is not None:
            if args:
                args = (self.given[index], *args[1:])
            else:
                kwargs["hidden_states"] = self.given[index]
        return self._watch(f"layer {index}", forward, *args, **kwargs)

    def _watch(self, name: str, forward: Callable, *args, **kwargs):
        out = forward(*args, **kwargs)
        self.outputs[name] = out if isinstance(out, Tensor) else out[0]
        return out

    def states(self, logits: Tensor) -> dict[str, Tensor]:
        """Everything to compare."""
        return {"the embeddings": self.inputs[0], **self.outputs, "the logits": logits}


def _complaints(model: OverSlots, route: Route) -> tuple[str | None, str | None]:
    """What is wrong if ragged windows over a cache of garbage differ from a plain forward: windows
    of chains, and one of a tree.
    """
    windows = route.layer_windows.values()
    sizes = [w.size if isinstance(w, Chunk) else w for w in windows if w is not None]
    length = max([6, *(size + 4 for size in sizes if size <= LONGEST_WINDOW)])
    tokens = _tokens(model, length)
    plain, inputs = _plain_states(model, route, tokens, None, None)
    rounding = _rounding(model, route, tokens, plain, inputs)

    def difference(slots: Tensor, states: dict[str, Tensor]) -> str | None:
        for name, ours in states.items():
            error = _distance(route, name, ours, _take(plain[name], slots))
            if not float(error) <= NOISE_FACTOR * rounding[name]:
                return (
                    f"{name} differs from its plain forward by {float(error):.3g} in rms, its "
                    f"rounding is {rounding[name]:.3g}"
                )
        return None

    trial = _Trial(model, route, tokens, inputs)
    for slots, states in trial.chains():
        if complaint := difference(slots, states):
            return complaint, None
    if route.mixers:
        return None, "recurrent layers read it as a chain"
    try:
        return None, difference(*trial.tree())
    except Exception as error:  # whatever a foreign model raises means: no trees
        return None, f"{type(error).__name__}: {error}"


def _plain_states(
    model: OverSlots,
    route: Route,
    tokens: Tensor,
    implementation: str | None,
    given: list[Tensor] | None,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """States of a plain forward, and the inputs of its decoder layers."""
    view = model.open_view(implementation)
    trace = _Trace(view, model.num_layers, route.compared_modules)
    trace.given = given
    try:
        logits = view(input_ids=tokens, use_cache=False).logits
    except Exception as error:
        raise ValueError(f"its own plain forward raises {type(error).__name__}: {error}") from error
    states = trace.states(logits)
    return states, [trace.inputs[i] for i in range(model.num_layers)]


def _rounding(
    model: OverSlots, route: Route, tokens: Tensor, plain: dict[str, Tensor], inputs: list[Tensor]
) -> dict[str, float]:
    """The rounding of every state, in rms.

    Where a model has one attention implementation only or none, and where two agree by chance to
    the last bit, it is what one rounding to the data type of the state does. In a wider data type
    than the model's (a residual stream in float32), that is no rounding: what a layer adds, and the
    logits, are products in the model's. Mixers enlarge rounding: with them, the rounding
    of a state is at least the change that a rounding of every layer's input makes in it.
    """
    other = plain
    # By sdpa some would run without what they have beyond softmax.
    second = "eager" if model.config._attn_implementation != "eager" else "sdpa"
    if second == "eager" or model.model._supports_sdpa:
        with suppress(ValueError):  # HF's eager attention of Kimi Linear counts heads wrongly
            other, _ = _plain_states(model, route, tokens, second, inputs)
    products = {"the logits": plain["the logits"]}
    for i, given in enumerate(inputs):
        out = plain[f"layer {i}"]
        products[f"layer {i}"] = out - given.to(out.device)

    dtypes = {model.model.dtype, *(plain[name].dtype for name in route.compared_modules)}
    unit, moved = max(torch.finfo(dtype).eps for dtype in dtypes), {}  # autocast rounds more
    if route.mixers:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(inputs[0].shape, generator=generator, dtype=torch.float64)
        noisy = [(x * (1 + unit * noise.to(x.device))).to(x.dtype) for x in inputs]
        moved, _ = _plain_states(model, route, tokens, None, noisy)

    def rounding_of(name: str, state: Tensor) -> float:
        found = [_rms(other[name].float() - state.float()), _one_rounding(state)]
        if moved:
            found.append(_distance(route, name, moved[name], state))
        if name in products and unit > torch.finfo(state.dtype).eps:
            found.append(unit * _rms(products[name]))
        return max(map(float, found))

    return {name: rounding_of(name, state) for name, state in plain.items()}


def _one_rounding(state: Tensor) -> Tensor:
    """What rounding once to the data type of its products does to a state, in rms."""
    rounds_products = state.is_cuda and torch.backends.cuda.matmul.allow_tf32
    # HF computes softmax and rotary angles in float32 even where a model is in float64.
    unit = max(torch.finfo(dtype).eps for dtype in (state.dtype, torch.float32))
    return max(unit, 2.0**-10 if rounds_products else 0.0) * _rms(state)


class _Trial:
    """Ragged windows of two texts over a cache of garbage, each with slots `[2, N]` of its tokens
    and their states.
    """

    def __init__(self, model: OverSlots, route: Route, tokens: Tensor, inputs: list[Tensor]):
        self._model, self._route, self._tokens, self._inputs = model, route, tokens, inputs
        self._view = model.open_view(route.attention, for_steps=True)
        remember(self._view, route.mixers, memory_of)
        self._trace = _Trace(self._view, model.num_layers, route.compared_modules)
        self._length = length = tokens.shape[1]
        options = {"mixers": route.mixers, "max_window": 2 * length}
        self._cache, device = SlotCache(2, 2 * length, route.shapes, **options), tokens.device
        self._everything = torch.arange(length, device=device).expand(2, -1)
        # Row 0 keeps all of the first window, row 1 all but the last token of it.
        self._half = length // 2
        self._kept = torch.tensor([[self._half], [self._half - 1]], device=device)
        self._later = self._kept + torch.arange(length - self._half, device=device)

    def chains(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Two windows, the second behind what was kept of the first."""
        self._run(self._tokens.flip(0, 1), self._everything)  # the garbage
        for slots in (self._everything[:, : self._half], self._later):
            self._trace.given = [_take(state, slots) for state in self._inputs]
            logits = self._run(self._tokens.gather(1, slots), slots)
            yield slots, self._trace.states(logits)
        if self._cache.memory is not None:  # the same behind a chunk of a prompt
            fill(self._cache, 0)
            slots = self._everything[:, : self._half]
            self._trace.given = [_take(state, slots) for state in self._inputs]
            ragged = torch.where(slots < self._kept, slots, self._cache.trash)
            self._run(self._tokens.gather(1, slots), ragged, is_chunk=True)
            self._trace.given = [_take(state, self._later) for state in self._inputs]
            logits = self._run(self._tokens.gather(1, self._later), self._later)
            yield self._later, self._trace.states(logits)

    def tree(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The second window once more, with an elder sibling from the other text before each token
        but the anchor.
        """
        positions = self._later.repeat_interleave(2, dim=1)[:, 1:]  # anchor, sibling, token, ...
        count = positions.shape[1]
        order = torch.arange(count, device=positions.device)
        is_other = order % 2 == 1
        visible = (order <= order[:, None]) & (~is_other | (order == order[:, None]))

        def among(state: Tensor) -> Tensor:
            own, other = _take(state, positions), _take(state.flip(0), positions)
            mask = is_other.to(own.device).view(1, -1, *[1] * (own.dim() - 2))
            return torch.where(mask, other, own)

        self._trace.given = [among(state) for state in self._inputs]
        slots = self._kept + order
        tree = {"positions": positions, "visible": visible[None]}
        states = self._trace.states(self._run(among(self._tokens), slots, **tree))
        return self._later, {name: state[:, ::2] for name, state in states.items()}

    def _run(self, tokens: Tensor, slots: Tensor, **window: Any) -> Tensor:
        options = {"num_attended": 2 * self._length, "layer_windows": self._route.layer_windows}
        window = self._cache.open_window(slots, **options, **window)
        return self._model.run(self._view, self._route.attention, window, tokens, self._cache)


def _take(state: Tensor, slots: Tensor) -> Tensor:
    """`[2, N, ...]`, the tokens at slots `[2, N]` of a state `[2, T, ...]`."""
    rows = torch.arange(2, device=state.device)[:, None]
    return state[rows, slots.to(state.device)]


def _distance(route: Route, name: str, ours: Tensor, theirs: Tensor) -> Tensor:
    """Rms over channels of a state `[2, N, ...]`, and over tokens. Experts of a mixture are chosen
    by rounded scores, and one token may get another one: outside attention and mixers most tokens
    have to agree, inside all of them.
    """
    errors = (ours.float() - theirs.float()).flatten(2).square().mean(dim=-1).sqrt().flatten()
    return _rms(errors) if name in route.compared_modules else errors.median()


def _rms(values: Tensor) -> Tensor:
    return values.float().square().mean().sqrt()
