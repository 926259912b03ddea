"""`private_view`: the modules of a model once more, over the same weights.

To run a model with another attention function its configuration has to say so, and to catch hidden
states its layers have to hand them out. Neither may be seen by the model's owner, who may call it
from another thread at any moment. A view has modules and configurations of its own and shares all
tensors and hooks, so it takes no memory and the model is never touched.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import TypeVar

from torch import nn
from transformers import GenerationConfig, PreTrainedConfig

from specdec.torch_names import COMPILED_CALL, COMPILED_FROM, SHARED, is_hook_table

Model = TypeVar("Model", bound=nn.Module)


def private_view(model: Model) -> Model:
    """A model with its own module objects and configurations, and the tensors and hooks of `model`.

    Weights that are changed in place, parameters that are replaced and hooks that are registered
    later are those of both. Modules that are replaced later are not (see `structure`).

    Args:
        model: any module. Functions among its attributes that lead to its modules (a `forward`
            that accelerate or a trainer has replaced) lead to those of the view.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> view = private_view(model)
        >>> view[0] is model[0], view[0].weight is model[0].weight
        (False, True)
    """
    return _Viewer().view(model)


def wrap_forward(module: nn.Module, around: Callable) -> None:
    """Makes `module(...)` call `around(forward, *args, **kwargs)`; only for modules of a view.

    Args:
        module: of a private view. What was wrapped before is inside, and hooks are outside.
        around: given the forward of the module and its arguments; returns what the module does.

    Example:
        >>> layer = private_view(nn.Identity())
        >>> wrap_forward(layer, lambda forward, x: 2 * forward(x))
        >>> layer(21)
        42
    """
    module.forward = partial(around, module.forward)


def own_copy(function: FunctionType, changed: dict | None = None) -> FunctionType:
    """A function with code of its own, and names of its module changed for it alone. Dynamo counts
    compilations per code object and makes no ninth one; a window of one token, or one row, is
    compiled for itself, so one model's code needs up to four. Models do not use up each other's.
    """
    names = function.__globals__ if changed is None else function.__globals__ | changed
    copy = FunctionType(
        function.__code__.replace(),
        names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def shared_with_model(view: nn.Module) -> list[tuple[str, dict | set, dict | set]]:
    """What a view shares with its model, by the modules' names: parameters, buffers and hooks, each
    with a copy of the container as it is now.
    """
    held = ((path, *item) for path, m in view.named_modules() for item in vars(m).items())
    return [
        (path, value, copy.copy(value))
        for path, name, value in held
        if _is_shared(name) and isinstance(value, dict | set)
    ]


def _is_shared(name: str) -> bool:
    return name in SHARED or is_hook_table(name)


_DICTIONARIES = dict, OrderedDict
"""The latter holds the modules of a list of torch's after `del layers[i]`."""


def _is_same(viewed: object, value: object) -> bool:
    """Whether the view of a value is that value, or a copy of a container of the same things."""
    if type(value) in (list, tuple):
        return all(map(_is_same, viewed, value))
    if type(value) in _DICTIONARIES:
        return all(map(_is_same, viewed.values(), value.values()))
    return viewed is value


class _Viewer:
    """Views of all objects that belong to one model, each made once."""

    def __init__(self):
        self._views: dict[int, object] = {}

    def view(self, value):
        """What stands for a value in the view: itself, unless it leads to modules."""
        if id(value) in self._views:
            return self._views[id(value)]
        if isinstance(value, nn.Module):
            return self._view_of_module(value)
        if isinstance(value, PreTrainedConfig | GenerationConfig):
            return copy.deepcopy(value, self._views)  # which notes down sub-configurations
        if type(value) in (list, tuple):
            return type(value)(self.view(item) for item in value)
        if type(value) in _DICTIONARIES:
            return type(value)((key, self.view(item)) for key, item in value.items())
        if isinstance(value, type) or not callable(value):
            return value
        if hasattr(value, COMPILED_FROM):  # compiled for the model, not for a view
            return self.view(getattr(value, COMPILED_FROM))
        if isinstance(value, MethodType):
            is_of_module = isinstance(value.__self__, nn.Module)
            func, owner = value.__func__, value.__self__
            return MethodType(self.view(func), self.view(owner)) if is_of_module else value
        if isinstance(value, partial):
            func, args, keywords = map(self.view, (value.func, value.args, value.keywords))
            return partial(func, *args, **keywords)
        if isinstance(value, FunctionType):
            return self._view_of_function(value)
        return self._view_of_callable(value) if hasattr(value, "__dict__") else value

    def _view_of_function(self, function: FunctionType) -> FunctionType:
        """A wrapper around a forward, around that of the view. Cells that lead to no module (a
        counter, a log) stay shared.
        """
        self._views[id(function)] = function  # where it refers to itself
        own = [*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__]
        cells, *defaults = own[:-2], *map(self.view, own[-2:])
        for index, cell in enumerate(cells):
            with suppress(ValueError):  # of an empty cell
                viewed = self.view(cell.cell_contents)
                if not _is_same(viewed, cell.cell_contents):
                    cells[index] = CellType(viewed)
        if not _is_same([*cells, *defaults], own):
            names = function.__globals__, function.__name__
            other = FunctionType(function.__code__, *names, defaults[0], tuple(cells))
            other.__kwdefaults__ = defaults[1]
            self._views[id(function)] = other
        return self._views[id(function)]

    def _view_of_callable(self, value: Callable) -> Callable:
        """An object around a forward, likewise."""
        self._views[id(value)] = value
        held = self.view(vars(value))
        if not _is_same(held, vars(value)):
            other = self._views[id(value)] = object.__new__(type(value))  # `copy` may raise
            vars(other).update(held)
        return self._views[id(value)]

    def _view_of_module(self, module: nn.Module) -> nn.Module:
        other = object.__new__(type(module))
        self._views[id(module)] = other
        for name, value in vars(module).items():
            if name == COMPILED_CALL:
                value = None  # it would run the model instead of the view
            other.__dict__[name] = value if _is_shared(name) else self.view(value)
        return other
