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
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specdec.target.attention import ATTENTION, PROBE, LearnedLayer
from specdec.target.cache import KeyValueShape, SlotCache
from specdec.target.features import decoder_layers
from specdec.target.view import adapters_of, wrap_forward

NOISE_FACTOR = 4.0
"""A part of a model may differ by so many times its measured rounding."""
LONGEST_WINDOW = 64
"""Sliding windows of up to so many tokens are exceeded by the texts of the trial."""


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
    mask; the sliding window of each layer, `None` for full attention; what each layer stores of a
    token; the names of the modules that call the attention function.
    """

    attention: str | None
    layer_windows: dict[int, int | None]
    shapes: dict[int, KeyValueShape]
    attention_modules: tuple[str, ...]


@torch.no_grad()
def find_route(model: OverSlots) -> Route:
    """The first way of running a model that reproduces its own plain forward.

    Raises:
        LeftOutError: the model is loaded so that its plain forward leaves out a part of it.
        ValueError: none does; the message says what each of them ran into.
    """
    complaints = []
    for learn in (_through_attention_interface, _with_dense_mask):
        try:
            route = learn(model)
            complaint = _difference(model, route)
        except LeftOutError:
            raise
        except Exception as error:  # whatever a foreign model raises means: not this route
            complaint = f"{type(error).__name__}: {error}"
        if complaint is None:
            return route
        complaints.append(complaint)
    raise ValueError(
        f"{type(model.model).__name__} cannot be decoded over specdec's cache "
        f"({'; then '.join(complaints)}). Use HF generate for this model"
    )


def _through_attention_interface(model: OverSlots) -> Route:
    """Asks HF for the mask of each layer."""
    learned: dict[int, LearnedLayer] = {}
    view = model.open_view(PROBE)
    shapes = _stored_shapes(model, view, slot_window=learned)
    for layer, (mask, _, has_softcap) in learned.items():
        if has_softcap and model.config._attn_implementation == "sdpa":
            raise LeftOutError(
                f"{type(model.model).__name__} caps its attention scores, which HF's sdpa leaves "
                "out; load it with attn_implementation='eager'"
            )
        if mask is not None and not mask.is_causal_within():
            raise ValueError(
                f"layer {layer} attends by a mask that is neither causal nor a sliding window"
            )
    windows = {i: mask and mask.sliding_window for i, (mask, _, _) in learned.items()}
    for layer in _sliding_layers(model):
        if windows.get(layer) is None:
            raise ValueError(f"layer {layer} is sliding_attention but has no sliding window")
    modules = {id(module) for _, module, _ in learned.values()}
    names = tuple(name for name, module in view.named_modules() if id(module) in modules)
    return Route(ATTENTION, windows, shapes, names)


def _with_dense_mask(model: OverSlots) -> Route:
    """For models that never call the interface."""
    if _sliding_layers(model) or getattr(model.config, "sliding_window", None):
        raise ValueError("one dense mask cannot hold a sliding window of some layers")
    return Route(None, {}, _stored_shapes(model, model.open_view(None)), ())


def _stored_shapes(
    model: OverSlots, view: PreTrainedModel, **options: object
) -> dict[int, KeyValueShape]:
    """What the layers of a view store of a token, seen in HF's own cache after a forward."""
    cache = DynamicCache()
    view(input_ids=_tokens(model, 2), past_key_values=cache, use_cache=True, **options)
    return {
        index: KeyValueShape(
            *(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]),
            *(layer.keys.dtype, layer.keys.device),
        )
        for index, layer in enumerate(cache.layers)
        if layer.is_initialized
    }


def _sliding_layers(model: OverSlots) -> list[int]:
    """Layers that the configuration declares as sliding-window attention."""
    layer_types = getattr(model.config, "layer_types", None) or ()
    return [i for i, kind in enumerate(layer_types) if kind == "sliding_attention"]


def _tokens(model: OverSlots, length: int) -> Tensor:
    """Two texts `[2, length]`."""
    return (torch.arange(2 * length, device=model.device).view(2, -1) * 7 + 1) % model.vocab_size


class _Trace:
    """What went through the decoder layers and attention modules of a private view in one forward,
    each `[2, N, ...]`. Inputs that are `given` replace those of the decoder layers.
    """

    def __init__(self, view: PreTrainedModel, num_layers: int, attention_modules: tuple[str, ...]):
        self.given: list[Tensor] | None = None
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        for i, layer in enumerate(decoder_layers(view, num_layers)[1]):
            wrap_forward(layer, partial(self._run_layer, i))
        for name in attention_modules:
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


def _difference(model: OverSlots, route: Route) -> str | None:
    """An error message if ragged windows over a cache of garbage differ from a plain forward."""
    windows = [w for w in route.layer_windows.values() if w is not None and w <= LONGEST_WINDOW]
    length = max([6, *(w + 4 for w in windows)])
    tokens = _tokens(model, length)
    plain, inputs = _plain_states(model, route, tokens, None, None)
    rounding = _rounding(model, route, tokens, plain, inputs)
    for slots, states in _windowed_states(model, route, tokens, inputs):
        for name, ours in states.items():
            theirs = _take(plain[name], slots)
            limit = NOISE_FACTOR * rounding[name]
            # Experts of a mixture are chosen by rounded scores, and one token may get another one:
            # outside attention most tokens have to agree, inside all of them.
            errors = _error_per_token(ours, theirs)
            error = _rms(errors) if name in route.attention_modules else errors.median()
            if not float(error) <= limit:
                return (
                    f"{name} differs from its plain forward by {float(error):.3g} in rms, its "
                    f"rounding is {rounding[name]:.3g}"
                )
    return None


def _plain_states(
    model: OverSlots,
    route: Route,
    tokens: Tensor,
    implementation: str | None,
    given: list[Tensor] | None,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """States of a plain forward, and the inputs of its decoder layers."""
    view = model.open_view(implementation)
    trace = _Trace(view, model.num_layers, route.attention_modules)
    trace.given = given
    states = trace.states(view(input_ids=tokens, use_cache=False).logits)
    return states, [trace.inputs[i] for i in range(model.num_layers)]


def _rounding(
    model: OverSlots, route: Route, tokens: Tensor, plain: dict[str, Tensor], inputs: list[Tensor]
) -> dict[str, float]:
    """The rounding of every state, in rms.

    Where a model has one attention implementation only, and where two agree by chance to the last
    bit, it is what one rounding to the data type of the state does.
    """
    other = plain
    if model.config._attn_implementation != "eager":
        other, _ = _plain_states(model, route, tokens, "eager", inputs)
    elif model.model._supports_sdpa:  # else it would run without what it has beyond softmax
        other, _ = _plain_states(model, route, tokens, "sdpa", inputs)
    return {
        name: float(torch.maximum(_rms(other[name].float() - state.float()), _one_rounding(state)))
        for name, state in plain.items()
    }


def _one_rounding(state: Tensor) -> Tensor:
    """What rounding once to the data type of its products does to a state, in rms."""
    rounds_products = state.is_cuda and torch.backends.cuda.matmul.allow_tf32
    # HF computes softmax and rotary angles in float32 even where a model is in float64.
    unit = max(torch.finfo(dtype).eps for dtype in (state.dtype, torch.float32))
    return max(unit, 2.0**-10 if rounds_products else 0.0) * _rms(state)


def _windowed_states(model: OverSlots, route: Route, tokens: Tensor, inputs: list[Tensor]):
    """Slots `[2, N]` and states of ragged windows over a cache of garbage."""
    view = model.open_view(route.attention, for_steps=True)
    trace = _Trace(view, model.num_layers, route.attention_modules)
    length = tokens.shape[1]
    cache, device = SlotCache(2, length + 2, route.shapes), tokens.device

    def run(tokens: Tensor, slots: Tensor) -> Tensor:
        windows = route.layer_windows
        window = cache.open_window(slots, num_attended=length + 2, layer_windows=windows)
        return model.run(view, route.attention, window, tokens, cache)

    everything = torch.arange(length, device=device).expand(2, -1)
    run(tokens.flip(0, 1), everything)  # the garbage
    # Row 0 keeps all of the first window, row 1 all but the last token of it.
    half = length // 2
    kept = torch.tensor([[half], [half - 1]], device=device)
    later = kept + torch.arange(length - half, device=device)
    for slots in (everything[:, :half], later):
        trace.given = [_take(state, slots) for state in inputs]
        logits = run(tokens.gather(1, slots), slots)
        yield slots, trace.states(logits)


def _take(state: Tensor, slots: Tensor) -> Tensor:
    """`[2, N, ...]`, the tokens at slots `[2, N]` of a state `[2, T, ...]`."""
    rows = torch.arange(2, device=state.device)[:, None]
    return state[rows, slots.to(state.device)]


def _error_per_token(ours: Tensor, theirs: Tensor) -> Tensor:
    """`[2 N]` rms over all channels."""
    return (ours.float() - theirs.float()).flatten(2).square().mean(dim=-1).sqrt().flatten()


def _rms(values: Tensor) -> Tensor:
    return values.float().square().mean().sqrt()
