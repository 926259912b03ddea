"""One matrix product in place of several: q, k, v of an attention module, gate and up of an MLP.

A step over a few tokens reads every weight once, and a small product does not fill the memory bus
of a GPU. Weights of linear layers that read one input are therefore laid one after the other in a
buffer. The model's own parameters become views of that buffer, so that nothing is stored twice.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.hf.layers import GATE_UP, QKV
from specdec.targets.edits.edit import Faster
from specdec.targets.view import wrap_forward
from specdec.targets.watch import is_hooked


class Group(NamedTuple):
    """Sibling layers: the path of their parent in the model, and their names."""

    path: str
    names: tuple[str, ...]

    def of(self, model: nn.Module) -> list[nn.Linear]:
        """The layers themselves, in a model or in a view of it."""
        parent = model.get_submodule(self.path)
        return [getattr(parent, name) for name in self.names]


class JointProducts(Faster):
    """Linear layers that read one input are one product.

    Args:
        groups: of layers of the model.
    """

    given_up = "products are not joined: "

    def __init__(self, groups: tuple[Group, ...]):
        self._groups = groups

    @classmethod
    def of(cls, model: nn.Module) -> tuple[JointProducts | None, str]:
        """For a model, and a note on it; `None` where nothing can be joined."""
        groups, note = siblings(model)
        return (cls(groups) if groups else None), note

    def __call__(self, view: nn.Module) -> None:
        for group in self._groups:
            JointProduct(view, group).install()

    def prepare(self, model: nn.Module) -> None:
        """Makes parameters of each group views of one buffer."""
        join_weights(model, self._groups)

    def undo(self, model: nn.Module) -> None:
        """Gives them storage of their own again."""
        separate_weights(model, self._groups)

    def fits(self, model: nn.Module) -> bool:
        """Whether the same layers can be joined."""
        return self._groups == siblings(model)[0]

    def stored_anew(self, model: nn.Module) -> list[nn.Module]:
        """The layers that are joined."""
        return [layer for group in self._groups for layer in group.of(model)]


def siblings(model: nn.Module) -> tuple[tuple[Group, ...], str]:
    """Layers of a model that can be joined without changing a value, or anybody else's storage; and
    a note on which are, and which are not.
    """
    owners = Counter(map(_storage, _parameters_of(model)))
    joined, left = [], Counter()
    for group in _groups(model):
        obstacle = _obstacle(group.of(model), owners)
        if obstacle is None:
            joined.append(group)
        else:
            left[f"{', '.join(group.names)} ({obstacle})"] += 1
    kinds = Counter(", ".join(group.names) for group in joined)
    note = f"{_listed(kinds)} are one product each, over parameters that are views of one buffer"
    if not joined:
        note = "products are not joined: no sibling linear layers that store weights of their own"
    return tuple(joined), f"{note}; left alone: {_listed(left)}" if left else note


def join_weights(model: nn.Module, groups: Sequence[Group]) -> None:
    """Makes weights (and biases) of each group views of one buffer, unless they are so already. The
    parameters stay the same objects with the same values.
    """
    for layers in (group.of(model) for group in groups):
        for parameters in _tables(layers):
            if _spanned(parameters) is None:
                with torch.inference_mode(False), torch.no_grad():
                    buffer = torch.cat([parameter.data for parameter in parameters])
                    rows = [len(parameter) for parameter in parameters]
                    for parameter, part in zip(parameters, buffer.split(rows), strict=True):
                        parameter.data = part


def separate_weights(model: nn.Module, groups: Sequence[Group]) -> None:
    """Undoes `join_weights`."""
    with torch.inference_mode(False), torch.no_grad():
        for parameter in (p for g in groups for m in g.of(model) for p in m.parameters()):
            parameter.data = parameter.data.clone()


class JointProduct:
    """The product of a group of a view.

    Inside a forward of their parent, the first layer that is called computes the product for all,
    and the others return their part of it if they are called with the same tensor. What is computed
    is dropped when the parent's forward ends, and each thread has its own.

    Args:
        view: whose layers' weights are joined.
        group: of the layers.
    """

    def __init__(self, view: nn.Module, group: Group):
        layers = group.of(view)
        self.names, self._layers = group.names, layers
        self._parent = view.get_submodule(group.path)
        self._sizes = [layer.out_features for layer in layers]
        self._weight, *bias = map(_spanned, _tables(layers))
        self._bias = bias[0] if bias else None
        self._held = threading.local()

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each of the layers returns for `x` `[..., in]`."""
        return F.linear(x, self._weight, self._bias).split(self._sizes, dim=-1)

    @property
    def is_whole(self) -> bool:
        """Whether the parent still has these layers."""
        return all(
            getattr(self._parent, name) is m
            for name, m in zip(self.names, self._layers, strict=True)
        )

    def install(self) -> None:
        """Makes the layers return their parts; the parent's `joint_product` is this one."""
        self._forward = vars(self._parent).get("forward")
        for index, layer in enumerate(self._layers):
            wrap_forward(layer, partial(self._part, index))
        wrap_forward(self._parent, self._around)
        self._parent.joint_product = self

    def take_out(self) -> None:
        """Takes back what `install` did to forwards, for who calls `parts` in the parent's forward,
        or changes that and calls `install` again.
        """
        for module in (*self._layers, self._parent):
            del module.forward
        if self._forward is not None:
            self._parent.forward = self._forward

    def _around(self, forward: Callable, *args, **kwargs):
        self._held.product = None, ()
        try:
            return forward(*args, **kwargs)
        finally:
            del self._held.product

    def _part(self, index: int, forward: Callable, x: Tensor) -> Tensor:
        given, parts = getattr(self._held, "product", (x, ()))
        if given is None:
            given, parts = self._held.product = x, self.parts(x)
        return parts[index] if given is x and parts else forward(x)


def _listed(counts: Counter) -> str:
    return ", ".join(f"{count} x {what}" for what, count in counts.items())


def _groups(model: nn.Module) -> Iterator[Group]:
    for path, module in model.named_modules():
        children = dict(module.named_children())
        for names in (QKV, GATE_UP):
            if children.keys() >= set(names):
                yield Group(path, names)


def _tables(layers: list[nn.Linear]) -> Iterator[list[nn.Parameter]]:
    """Their weights, and their biases if they have some."""
    yield [layer.weight for layer in layers]
    if layers[0].bias is not None:
        yield [layer.bias for layer in layers]


def _parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """With one entry for every module that has it."""
    return [parameter for _, parameter in module.named_parameters(remove_duplicate=False)]


def _obstacle(layers: list[nn.Module], owners: Counter) -> str | None:
    """Why sibling layers cannot be joined."""
    for layer in layers:
        kind = type(layer)
        if kind is not nn.Linear:
            return f"{kind.__module__}.{kind.__qualname__}"
        if is_hooked(layer):
            return "with hooks or a forward of their own"
    parameters = [p for layer in layers for p in _parameters_of(layer)]
    foreign = [p for p in parameters if type(p) is not nn.Parameter or type(p.data) is not Tensor]
    if foreign:
        return type(foreign[0].data).__name__
    if any(p.is_meta or p.is_inference() for p in parameters):
        return "no weights that can be moved"
    alike = {(p.dtype, p.device, layer.in_features) for layer in layers for p in layer.parameters()}
    if len(alike) > 1 or len({layer.bias is None for layer in layers}) > 1:
        return "not alike"
    for table in _tables(layers):
        is_own = sum(owners[storage] for storage in set(map(_storage, table))) == len(table)
        if not is_own or len({p.data_ptr() for p in table}) < len(table):
            return "storage that others share"
    return None


def _storage(parameter: nn.Parameter) -> int:
    if type(parameter.data) is not Tensor or parameter.is_meta:
        return -1
    return parameter.untyped_storage().data_ptr()


def _spanned(parameters: list[nn.Parameter]) -> Tensor | None:
    """All rows of parameters that follow each other in one storage; `None` if they do not."""
    first = parameters[0].detach()
    end = first.data_ptr()
    for parameter in parameters:
        is_next = _storage(parameter) == _storage(first) and parameter.data_ptr() == end
        if not is_next or not parameter.is_contiguous():
            return None
        end += parameter.nbytes
    return first.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())
