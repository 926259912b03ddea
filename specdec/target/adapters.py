"""An adapter for each row: the plain LoRA layers of PEFT, in which every row of a batch gets the
product of its own adapter.

PEFT sorts the rows of a batch by the names of their adapters, in Python. Here adapters are numbered
and a tensor holds the number of each row, so that steps can be captured. 0 is the base model.

Legend: B rows, N tokens, R the largest rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from specdec.arguments import shown
from specdec.target.view import wrap_forward

BASE = "__base__"
"""PEFT's name for no adapter."""

_PLAIN = "peft.tuners.lora.layer.Linear"

_INSTEAD = "generate with one adapter at a time (model.set_adapter, then generator.refresh())"


def adapter_indices(model: nn.Module, names: Sequence[str]) -> list[int]:
    """The numbers of adapters.

    Args:
        model: whose layers have them.
        names: PEFT's, one for each row.

    Raises:
        TypeError: not a sequence of names.
        ValueError: a name that no layer has, or layers that cannot have an adapter for each row.
    """
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    if not is_list or not all(isinstance(name, str) for name in names):
        raise TypeError(
            "row_inputs['adapter'] must be a sequence of names of adapters, one for each row or "
            f"prompt, got {shown(names)}"
        )
    layers = dict(_layers_of_peft(model))
    for path, layer in layers.items():
        if fault := _fault(layer):
            raise ValueError(
                "row_inputs['adapter'] needs plain LoRA layers, active and not merged, and "
                f"{path} is {fault}; {_INSTEAD}"
            )
    known = _names(layers.values())
    if missing := sorted(set(names) - set(known)):
        raise ValueError(
            f"row_inputs['adapter'] names {missing[0]!r}, and the model has "
            f"{', '.join(map(repr, known))}"
        )
    return [known.index(name) for name in names]


def _layers_of_peft(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose class is PEFT's own, by name. What is in plain LoRA layers is torch's."""
    for path, module in model.named_modules():
        if type(module).__module__.startswith("peft."):
            yield path, module


def _is_plain(layer: nn.Module) -> bool:
    return f"{type(layer).__module__}.{type(layer).__qualname__}" == _PLAIN


def _fault(layer: nn.Module) -> str | None:
    """Why the rows of a layer cannot have adapters of their own; `None` if they can."""
    if not _is_plain(layer):
        return f"a {type(layer).__name__}"
    if layer.merged or layer.disable_adapters:
        return "merged" if layer.merged else "disabled"
    for variant in getattr(layer, "lora_variant", {}).values():
        return f"a {type(variant).__name__}"
    if any(up.bias is not None for up in layer.lora_B.values()):
        return "one with a bias (lora_bias=True)"
    weights = [*layer.lora_A.parameters(), *layer.lora_B.parameters()]
    return "offloaded" if any(weight.is_meta for weight in weights) else None


def _names(layers: Sequence[nn.Module]) -> list[str]:
    """Of all adapters, in the order of their numbers."""
    return list(dict.fromkeys([BASE, *(name for layer in layers for name in layer.lora_A)]))


class RowAdapters(threading.local):
    """Which adapter each row of a forward has. Forwards in other threads have others.

    Attributes:
        rows: `[B]` int64, numbers of adapters; `None` for the adapters that are active.
    """

    rows: Tensor | None = None

    def install(self, view: nn.Module) -> None:
        """Makes the plain LoRA layers of a private view compute by `rows` where it is set."""
        layers = {path: m for path, m in _layers_of_peft(view) if _is_plain(m) and len(m.lora_A)}
        names = _names(layers.values())
        for path, layer in layers.items():
            wrap_forward(layer, partial(self._forward, path, layer, names))

    def _forward(
        self, path: str, layer: nn.Module, names: list[str], forward: Callable, x: Tensor, **options
    ) -> Tensor:
        if self.rows is None:
            return forward(x, **options)
        if x.dim() != 3 or len(x) != len(self.rows):
            raise ValueError(
                "row_inputs['adapter'] needs layers that read each row by itself, and "
                f"{path} gets {list(x.shape)} for {len(self.rows)} rows; {_INSTEAD}"
            )
        out = layer.base_layer(x, **options)
        down, up = _matrices(layer, names, self.rows.to(x.device))
        return out + (x.to(down.dtype) @ down.mT @ up).to(out.dtype)


def _matrices(layer: nn.Module, names: list[str], rows: Tensor) -> tuple[Tensor, Tensor]:
    """Both matrices of each row's adapter, `[B, R, in]` and, scaled, `[B, R, out]`: smaller ranks
    end in zeros, and a row whose adapter is not in this layer has nothing else. They are gathered
    in every forward, so that weights may change in place.
    """
    pairs = {
        name: (down.weight, layer.lora_B[name].weight.mT * layer.scaling[name])
        for name, down in layer.lora_A.items()
    }
    none = tuple(matrix[:0] for matrix in next(iter(pairs.values())))
    downs, ups = zip(*(pairs.get(name, none) for name in names), strict=True)
    return tuple(pad_sequence(own, batch_first=True)[rows] for own in (downs, ups))
