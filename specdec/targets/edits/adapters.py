"""An adapter for each row: the plain LoRA layers of PEFT, in which every row of a batch gets the
product of its own adapter; and Activated LoRA, which begins at a token of each row's prompt.

PEFT sorts the rows of a batch by the names of their adapters, in Python. Here adapters are numbered
and a tensor holds the number of each row, so that steps can be captured. 0 is the base model. Where
Activated LoRA begins is a number of each row, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from specdec.arguments import shown
from specdec.slots.cache import Window
from specdec.targets.activation import ACTIVATED, activation_in
from specdec.targets.edits.edit import Running
from specdec.targets.view import wrap_forward
from specdec.torch_names import pre_hooks_of
from specdec.types import Draft

_INSTEAD = "generate with one adapter at a time (model.set_adapter, then generator.refresh())"


def adapter_indices(model: nn.Module, names: Sequence[str]) -> list[int]:
    """The numbers of adapters, from PEFT's names; Raises as `Target.adapter_indices`."""
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    if not is_list or not all(isinstance(name, str) for name in names):
        raise TypeError(
            "row_inputs['adapter'] must be a sequence of names of adapters, one for each row or "
            f"prompt, got {shown(names)}"
        )
    layers = _layers_of_peft(model)
    if not layers:
        raise ValueError(
            f"row_inputs['adapter'] names adapters, and {type(model).__name__} has no layers of "
            "PEFT's; load them first (PeftModel.from_pretrained(model, path)) and make the "
            "generator with that model, or leave row_inputs['adapter'] out"
        )
    for path, layer in layers.items():
        if fault := _fault(layer):
            raise ValueError(
                "row_inputs['adapter'] needs plain LoRA layers, active and not merged, and "
                f"{path} is {fault}; {_INSTEAD}"
            )
    known = _names(layers.values())
    if missing := sorted(set(names) - set(known)):
        known = ", ".join(map(repr, known))
        raise ValueError(f"row_inputs['adapter'] names {missing[0]!r}, and the model has {known}")
    return [known.index(name) for name in names]


@torch.inference_mode()
def tried_indices(target: Any, names: Sequence[str]) -> list[int]:
    """`adapter_indices` of a target, after a forward in which rows have adapters."""
    found = adapter_indices(target.model, names)
    rows = torch.zeros(3, dtype=torch.long, device=target.device)
    cache, draft = target.init_cache(3, 2), Draft(rows[:, None])
    cache.row_inputs = {"adapter": rows, "prompt_end": rows}
    target.verify(cache, rows, rows, draft)
    return found


def _layers_of_peft(model: nn.Module) -> dict[str, nn.Module]:
    """Modules whose class is PEFT's own, by name. What is in plain LoRA layers is torch's."""
    modules = model.named_modules()
    return {path: m for path, m in modules if type(m).__module__.startswith("peft.")}


def _fault(layer: nn.Module) -> str | None:
    """Why the rows of a layer cannot have adapters of their own; `None` if they can."""
    kind = type(layer)
    if f"{kind.__module__}.{kind.__qualname__}" != "peft.tuners.lora.layer.Linear":
        return f"a {kind.__name__}"
    for variant in getattr(layer, "lora_variant", {}).values():
        return f"a {type(variant).__name__}"
    if any(up.bias is not None for up in layer.lora_B.values()):
        return "one with a bias (lora_bias=True)"
    if layer.merged or layer.disable_adapters:
        return "merged" if layer.merged else "disabled"
    weights = [*layer.lora_A.parameters(), *layer.lora_B.parameters()]
    return "offloaded" if any(weight.is_meta for weight in weights) else None


def _names(layers: Iterable[nn.Module]) -> list[str]:
    """Of all adapters, in the order of their numbers, after PEFT's name for none."""
    return list(dict.fromkeys(["__base__", *(name for layer in layers for name in layer.lora_A)]))


def edit(view: nn.Module, attention: str | None = None) -> None:
    """Makes the plain LoRA layers of a private view compute by the adapters of a window's rows,
    where it has some: by `row_inputs["adapter"]`, `[B]` int64, numbers of adapters.
    """
    layers = {path: m for path, m in _layers_of_peft(view).items() if not _fault(m)}
    names = _names(layers.values())
    for path, layer in layers.items():
        wrap_forward(layer, partial(_forward, view.running, path, layer, names))
    for layer in activated_layers(view):
        own = layer.lora_variant.items()
        since = Adapted(view.running, _since_activation)
        layer.lora_variant = {n: since if _is_activated(v) else v for n, v in own}


def inputs_of(model: nn.Module) -> tuple[str, ...]:
    """Names of what a call may bring for each row."""
    return ("adapter", ACTIVATED) if activated_layers(model) else ("adapter",)


def activated_layers(model: nn.Module) -> list[nn.Module]:
    """Layers of PEFT's with an adapter of Activated LoRA."""
    layers = _layers_of_peft(model).values()
    return [m for m in layers if any(map(_is_activated, getattr(m, "lora_variant", {}).values()))]


def _is_activated(variant: object) -> bool:
    return type(variant).__name__ == "ALoraLinearVariant"


def activation(
    outer: nn.Module, model: nn.Module, tokens: Tensor, lengths: Sequence[int]
) -> dict[str, list[int]]:
    """Row inputs of a model with Activated LoRA: how many tokens at the end of each row's prompt
    are adapted, as are all after them; 0 for none.

    Args:
        outer: what the user handed over, a `PeftModel` or another wrapper of `model`.
        model: the HF model inside.
        tokens: `[B, L]`, each row's prompt from the first column on.
        lengths: tokens of each prompt.
    """
    prompts = [row[:n] for row, n in zip(tokens.tolist(), lengths, strict=True)]
    hooks = pre_hooks_of(activated_layers(model)[0]).values()
    found = next(filter(None, map(activation_in, hooks)), None)  # inside of PEFT's generate
    if found is None:
        if not hasattr(outer, "active_peft_config"):  # whose own generate activates nothing
            return {ACTIVATED: [0] * len(prompts)}
        from peft.tuners.lora.variants import get_alora_offsets_for_generate as find

        each = (find(outer, input_ids=torch.tensor([p], device="cpu")) for p in prompts)
        found = [own["alora_offsets"][0] if ACTIVATED in own else 0 for own in each]
    copies = max(len(prompts) // len(found), 1)
    return {ACTIVATED: [number or 0 for number in found for _ in range(copies)]}


class Adapted:
    """In a private view, what a variant of PEFT's is in a LoRA layer: it adapts some tokens of a
    window.

    Args:
        running: of the view.
        is_on: (window) -> `[B, N]` bool, which tokens; `None` for none of them.
    """

    def __init__(self, running: Running, is_on: Callable[[Window], Tensor | None]):
        self._running, self._is_on = running, is_on

    def forward(
        self, layer: nn.Module, active_adapter: str, x: Tensor, result: Tensor, **_: object
    ) -> Tensor:
        """`[B, N, out]`; arguments as of PEFT's variants."""
        window = self._running.window
        is_on = None if window is None else self._is_on(window.on(x.device))
        if is_on is None:
            return result
        if x.shape[:-1] != is_on.shape:
            raise ValueError(
                "adapters of some tokens need layers that read each row by itself, and a "
                f"{type(layer.base_layer).__name__} gets {list(x.shape)} for a window of "
                f"{list(is_on.shape)}; Activated LoRA runs in the model's own generate"
            )
        down, up = layer.lora_A[active_adapter], layer.lora_B[active_adapter]
        added = up(down(x.to(down.weight.dtype))) * layer.scaling[active_adapter]
        return (result + added.where(is_on[..., None], 0)).to(result.dtype)


def _since_activation(window: Window) -> Tensor | None:
    """Activated LoRA: tokens from the activation of their row on, where a call says when it is."""
    if ACTIVATED not in window.row_inputs:
        return None
    number = window.row_inputs[ACTIVATED][:, None]
    return (number > 0) & (window.since_prompt > -number)


NOISE = "noise_from"
"""Row input `[B]` int64: the first slot whose token a draft's adapter changes."""


def only_noise(view: nn.Module) -> None:
    """An edit: plain LoRA adapts the tokens from `NOISE` on; all where there is none, as a model is
    tried. `ValueError` for other layers of PEFT's.
    """

    def is_noise(window: Window) -> Tensor:
        first = window.row_inputs.get(NOISE)
        return window.slots >= (0 if first is None else first[:, None])

    for path, layer in _layers_of_peft(view).items():
        if fault := _fault(layer):
            raise ValueError(f"an adapter that drafts is plain LoRA, and {path} is {fault}")
        layer.lora_variant = dict.fromkeys(layer.lora_A, Adapted(view.running, is_noise))


def _forward(running: Running, path: str, layer: nn.Module, names, forward: Callable, x, **own):
    rows = None if running.window is None else running.window.row_inputs.get("adapter")
    if rows is None or not layer.lora_A:
        return forward(x, **own)
    if x.dim() != 3 or len(x) != len(rows):
        raise ValueError(
            "row_inputs['adapter'] needs layers that read each row by itself, and "
            f"{path} gets {list(x.shape)} for {len(rows)} rows; {_INSTEAD}"
        )
    down, up = _matrices(layer, names, rows.to(x.device))
    out = layer.base_layer(x)
    return out + (x.to(down.dtype) @ down.mT @ up).to(out.dtype)


def _matrices(layer: nn.Module, names: list[str], rows: Tensor) -> tuple[Tensor, Tensor]:
    """Both matrices of each row's adapter, `[B, R, in]` and, scaled, `[B, R, out]`, of the largest
    rank R: smaller ones end in zeros, and a row whose adapter is not in this layer has nothing
    else. They are gathered in every forward, so that weights may change in place.
    """
    pairs = {
        name: (down.weight, layer.lora_B[name].weight.mT * layer.scaling[name])
        for name, down in layer.lora_A.items()
    }
    none = tuple(matrix[:0] for matrix in next(iter(pairs.values())))
    downs, ups = zip(*(pairs.get(name, none) for name in names), strict=True)
    return tuple(pad_sequence(own, batch_first=True)[rows] for own in (downs, ups))
