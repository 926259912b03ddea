"""The self-test: an HF model is accepted only if windows over a cache of garbage reproduce its own
plain forward.

An architecture may apply masks, biases and positions anywhere. So a model is run twice, plainly and
in ragged windows, and compared layer by layer. In the windowed run each layer is given what it was
given in the plain run. A difference is then that layer's own, and rounding does not accumulate over
layers until it hides a wrong mask in one of them. The tolerance is measured rounding: how far the
same layer, given the same input, differs between two attention implementations of HF.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.graphs.tree import fill
from specdec.hf import device_of
from specdec.target.cache import Chunk, SlotCache
from specdec.target.features import decoder_layers
from specdec.target.route import Route
from specdec.target.view import wrap_forward
from specdec.target.views import forward, open_view, open_views

NOISE_FACTOR = 4.0
"""A part of a model may differ by so many times its measured rounding."""
LONGEST_WINDOW = 64
"""Sliding windows and chunks of up to so many tokens are exceeded by the texts of the trial."""


def compare(model: PreTrainedModel, route: Route) -> tuple[str | None, Route]:
    """What is wrong if ragged windows over a cache of garbage differ from a plain forward, `None`
    if nothing is.

    Args:
        model: without wrappers.
        route: to be tried.

    Returns:
        The complaint about windows of chains, and the route with what was seen on the way: what is
        wrong with the window of a tree, and what decoder layers return.
    """
    windows = route.layer_windows.values()
    sizes = [w.size if isinstance(w, Chunk) else w for w in windows if w is not None]
    length = max([6, *(size + 4 for size in sizes if size <= LONGEST_WINDOW)])
    tokens = trial_texts(model, length)
    plain = _Trace(open_view(model, Route()), route)
    states = plain.run(tokens)
    rounding = _rounding(model, route, tokens, plain, states)

    def difference(slots: Tensor, ours: dict[str, Tensor]) -> str | None:
        for name, state in ours.items():
            error = _distance(route, name, state, _take(states[name], slots))
            if not float(error) <= NOISE_FACTOR * rounding[name]:
                return (
                    f"{name} differs from its plain forward by {float(error):.3g} in rms, its "
                    f"rounding is {rounding[name]:.3g}"
                )
        return None

    trial = _Trial(model, route, tokens, plain.inputs)
    for slots, ours in trial.chains():
        if complaint := difference(slots, ours):
            return complaint, route
    if route.mixers:
        of_trees = "recurrent layers read it as a chain"
    else:
        try:
            of_trees = difference(*trial.tree())
        except Exception as error:  # whatever a foreign model raises means: no trees
            of_trees = f"{type(error).__name__}: {error}"
    return None, replace(route, fault_of_trees=of_trees, returns_tuples=plain.has_tuples)


def trial_texts(model: PreTrainedModel, length: int) -> Tensor:
    """Two texts `[2, length]`."""
    device = device_of(model.get_input_embeddings())
    order = torch.arange(2 * length, device=device).view(2, -1)
    return (order * 7 + 1) % model.config.get_text_config().vocab_size


class _Trace:
    """What went through the decoder layers and the compared modules of a private view in one
    forward, each `[2, N, ...]`. Inputs that are `given` replace those of the decoder layers.
    """

    def __init__(self, view: PreTrainedModel, route: Route, given: dict[int, Tensor] | None = None):
        self.view, self.given = view, given
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.has_tuples = False
        for i, layer in enumerate(decoder_layers(view)[1]):
            wrap_forward(layer, partial(self._run_layer, i))
        for name in route.compared_modules:
            wrap_forward(view.get_submodule(name), partial(self._watch, name))

    def _run_layer(self, index: int, forward: Callable, *args, **kwargs):
        self.inputs[index] = args[0] if args else kwargs["hidden_states"]
        if self.given is not None:
            if args:
                args = (self.given[index], *args[1:])
            else:
                kwargs["hidden_states"] = self.given[index]
        out = self._watch(f"layer {index}", forward, *args, **kwargs)
        self.has_tuples |= not isinstance(out, Tensor)
        return out

    def _watch(self, name: str, forward: Callable, *args, **kwargs):
        out = forward(*args, **kwargs)
        self.outputs[name] = out if isinstance(out, Tensor) else out[0]
        return out

    def states(self, logits: Tensor) -> dict[str, Tensor]:
        """Everything to compare."""
        return {"the embeddings": self.inputs[0], **self.outputs, "the logits": logits}

    def run(self, tokens: Tensor) -> dict[str, Tensor]:
        """The same of a plain forward."""
        try:
            return self.states(self.view(input_ids=tokens, use_cache=False).logits)
        except Exception as error:
            found = f"its own plain forward raises {type(error).__name__}: {error}"
            raise ValueError(found) from error


def _rounding(
    model: PreTrainedModel, route: Route, tokens: Tensor, plain: _Trace, states: dict[str, Tensor]
) -> dict[str, float]:
    """The rounding of every state, in rms.

    Where a model has one attention implementation only or none, and where two agree by chance to
    the last bit, it is what one rounding to the data type of the state does. In a wider data type
    than the model's (a residual stream in float32), that is no rounding: what a layer adds, and the
    logits, are products in the model's. Mixers enlarge rounding: with them, the rounding
    of a state is at least the change that a rounding of every layer's input makes in it.
    """
    other, inputs = states, plain.inputs
    # By sdpa some would run without what they have beyond softmax.
    own = model.config.get_text_config()._attn_implementation
    second = "eager" if own != "eager" else "sdpa"
    if second == "eager" or model._supports_sdpa:
        with suppress(ValueError):  # HF's eager attention of Kimi Linear counts heads wrongly
            other = _Trace(open_view(model, Route(second)), route, inputs).run(tokens)
    products = {"the logits": states["the logits"]}
    for i, given in inputs.items():
        out = states[f"layer {i}"]
        products[f"layer {i}"] = out - given.to(out.device)

    dtypes = {model.dtype, *(states[name].dtype for name in route.compared_modules)}
    unit, moved = max(torch.finfo(dtype).eps for dtype in dtypes), {}  # autocast rounds more
    if route.mixers:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(inputs[0].shape, generator=generator, dtype=torch.float64, device="cpu")
        noisy = {i: (x * (1 + unit * noise.to(x.device))).to(x.dtype) for i, x in inputs.items()}
        moved = _Trace(open_view(model, Route()), route, noisy).run(tokens)

    def rounding_of(name: str, state: Tensor) -> float:
        found = [_rms(other[name].float() - state.float()), _one_rounding(state)]
        if moved:
            found.append(_distance(route, name, moved[name], state))
        if name in products and unit > torch.finfo(state.dtype).eps:
            found.append(unit * _rms(products[name]))
        return max(map(float, found))

    return {name: rounding_of(name, state) for name, state in states.items()}


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

    def __init__(
        self, model: PreTrainedModel, route: Route, tokens: Tensor, inputs: dict[int, Tensor]
    ):
        self._tokens, self._inputs = tokens, inputs
        views = open_views(model, route)
        self._views, self._trace = views._replace(chunk=views.step), _Trace(views.step, route)
        (rows, length), device = tokens.shape, tokens.device
        options = {"mixers": route.mixers, "max_window": 2 * length}
        self._cache = SlotCache(rows, 2 * length, route.shapes, **options)
        # Row 0 keeps all of the first window, row 1 all but the last token of it.
        half = length // 2
        self._everything = torch.arange(length, device=device).expand(rows, -1)
        self._first = self._everything[:, :half]
        self._kept = torch.tensor([[half], [half - 1]], device=device)
        self._later = self._kept + torch.arange(length - half, device=device)

    def chains(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Two windows, the second behind what was kept of the first."""
        first, later = (partial(_take, slots=slots) for slots in (self._first, self._later))
        self._states(lambda state: state.flip(0, 1), self._everything)  # the garbage
        yield self._first, self._states(first, self._first)
        yield self._later, self._states(later, self._later)
        if self._cache.memory is not None:  # the same behind a chunk of a prompt
            fill(self._cache, 0)
            ragged = torch.where(self._first < self._kept, self._first, self._cache.padding_slot)
            self._states(first, ragged, is_chunk=True)
            yield self._later, self._states(later, self._later)

    def tree(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The second window once more, with an earlier sibling from the other text before each
        token but the anchor.
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

        tree = {"positions": positions, "visible": visible[None]}
        states = self._states(among, self._kept + order, **tree)
        return self._later, {name: state[:, ::2] for name, state in states.items()}

    def _states(self, pick: Callable, slots: Tensor, **window: Any) -> dict[str, Tensor]:
        """Everything to compare, of a window of tokens that are picked from the texts."""
        self._trace.given = {i: pick(state) for i, state in self._inputs.items()}
        tokens, attended = pick(self._tokens), self._cache.num_slots
        options = {"num_attended": attended, **window}
        return self._trace.states(forward(self._views, tokens, self._cache, slots, **options)[0])


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
