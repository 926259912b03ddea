"""How the recurrent mixers of a model are found, and what closes their gates.

What leaves a state in HF's own cache during a forward is a mixer, and the linear layers inside of
it are its products. Which of these are its gates is not recorded per family: they are closed, and
where no state of any values moves, they were the gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from specdec.graphs.tree import tables
from specdec.targets.edits.memory import MixerPlan, Place
from specdec.targets.forward import forward, open_window
from specdec.targets.route import Route
from specdec.targets.trial.witness import trial_texts
from specdec.targets.view import wrap_forward
from specdec.targets.views import open_views


class WatchedCache(DynamicCache):
    """HF's own cache, which notes the modules that leave a state in it.

    Args:
        view: private, whose modules are watched from here on.
    """

    def __init__(self, view: PreTrainedModel):
        super().__init__(config=view.config)
        self.inside: list[str] = []
        self.inputs: dict[str, Tensor] = {}
        self.events: list[tuple[str, str, Tensor | Place]] = []  # (mixer, product or "", ...)
        for name, module in view.named_modules():
            is_product = isinstance(module, nn.Linear)
            wrap_forward(module, partial(self._product if is_product else self._around, name))

    def _around(self, name: str, forward: Callable, *args, **kwargs):
        self.inside.append(name)
        self.inputs[name] = args[0] if args else kwargs.get("hidden_states")
        out = forward(*args, **kwargs)
        self.inside.pop()
        return out

    def _product(self, name: str, forward: Callable, x: Tensor) -> Tensor:
        out = forward(x)
        for mixer in self.inside:
            self.events.append((mixer, name.removeprefix(f"{mixer}."), out))
        return out

    def update_conv_state(self, conv_states, layer_idx, state_idx=0, **kwargs):
        """HF's entry."""
        self.events.append((self.inside[-1], "", Place("conv", layer_idx, state_idx)))
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(self, recurrent_states, layer_idx, state_idx=0, **kwargs):
        """HF's entry."""
        self.events.append((self.inside[-1], "", Place("recurrent", layer_idx, state_idx)))
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def mixers(self) -> dict[str, MixerPlan]:
        """What was seen in a forward of windows `[2, N]`."""
        found = {}
        for name in dict.fromkeys(mixer for mixer, product, _ in self.events if not product):
            events = [event[1:] for event in self.events if event[0] == name]
            last = max(i for i, (product, _) in enumerate(events) if not product)
            hidden = self.inputs[name]
            states = {}
            for place in (place for product, place in events if not product):
                layer = self.layers[place.layer]
                tables = layer.conv_states if place.kind == "conv" else layer.recurrent_states
                states[place] = torch.zeros_like(tables[place.index][:1])
            products = {
                product: out[:1, :1].detach()
                for product, out in events[:last]
                if product and out.shape[:-1] == hidden.shape[:-1]
            }
            after = tuple(product for product, _ in events[last + 1 :] if product)
            found[name] = MixerPlan(states, hidden[:1, :1].detach(), products, after)
        return found


def with_gates(plan: MixerPlan, mixer: nn.Module) -> Iterator[MixerPlan]:
    """The plan of a mixer with all that its gates may be, to be tried, and last without. Gates are
    the products with a column or two per head, and one other one, or the last columns of one.
    """
    heads = {state.shape[1] for place, state in plan.states.items() if place.kind == "recurrent"}
    tried = [] if heads else [{}]
    for count in heads:
        widths = {product: one.shape[-1] for product, one in plan.products.items()}
        narrow = {p: slice(None) for p, width in widths.items() if width in (count, 2 * count)}
        columns = slice(-count, None), slice(None)
        tried += [narrow, *(narrow | {p: some} for p in widths for some in columns)]
    for gates in tried:
        yield plan._replace(gates=gates, floors=_floors(mixer) if gates else None)
    yield plan


def _floors(mixer: nn.Module) -> Tensor | None:
    """Where a mixer bounds its time step from below behind the softplus, a closed gate would stay
    open by that much. The same bound in front of the softplus leaves it closed.
    """
    lowest = getattr(mixer, "time_step_limit", (0.0,))[0]
    if not lowest:
        return None
    lowest = torch.tensor(lowest, dtype=torch.float32, device="cpu")
    return lowest.expm1().log().to(mixer.dt_bias) - mixer.dt_bias


def with_closing_gates(model: PreTrainedModel, route: Route) -> Route:
    """A route whose mixers have their gates; those of a mixer are left out where none are found."""
    tried = {n: with_gates(plan, model.get_submodule(n)) for n, plan in route.mixers.items()}
    chosen = {name: next(plans) for name, plans in tried.items()}
    while True:
        closed = _closed(model, replace(route, mixers=chosen))
        left = [n for n, plan in chosen.items() if plan.gates is not None and n not in closed]
        if not left:
            return replace(route, mixers=chosen)
        chosen |= {name: next(tried[name]) for name in left}


def _closed(model: PreTrainedModel, route: Route) -> list[str]:
    """Mixers whose states, of any values, a replay with all gates closed leaves as they are."""
    if not route.mixers:
        return []
    cache = route.init_cache(2, 16, max_window=3)
    host = {"dtype": torch.float32, "device": "cpu"}
    for tensor in tables(cache.memory).values():
        if tensor.is_floating_point():
            generator = torch.Generator().manual_seed(0)
            tensor.copy_(torch.randn(tensor.shape, generator=generator, **host))
    cache.memory.count.fill_(3)
    before = {place: state.clone() for place, state in cache.memory.states.items()}
    tokens = trial_texts(model, 3)
    slots = torch.arange(3, device=tokens.device).expand(2, -1)
    views = open_views(model, route)
    forward(views, tokens, cache, open_window(views, cache, slots))
    after = cache.memory.states
    return [
        name
        for name, plan in route.mixers.items()
        if all(torch.allclose(after[p], before[p], atol=1e-5) for p in plan.states)
    ]
