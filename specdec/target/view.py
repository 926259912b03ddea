"""`private_view`: the modules of a model once more, over the same weights.

To run a model with another attention function its configuration has to say so, and to catch hidden
states its layers have to hand them out. Neither may be seen by the model's owner, who may call it
from another thread at any moment. A view has modules and configurations of its own and shares all
tensors and hooks, so it takes no memory and the model is never touched.
"""

import copy
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import TypeVar

from torch import nn
from transformers import GenerationConfig, PreTrainedConfig

Model = TypeVar("Model", bound=nn.Module)


def private_view(model: Model) -> Model:
    """A model with its own module objects and configurations, and the tensors and hooks of `model`.

    Weights that are changed in place, parameters that are replaced and hooks that are registered
    later are those of both. Modules that are replaced later are not (see `structure`).

    Args:
        model: any module. Methods and partial functions among its attributes that are bound to its
            modules (accelerate dispatches a model in this way) are bound to those of the view.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> view = private_view(model)
        >>> view[0] is model[0], view[0].weight is model[0].weight
        (False, True)
    """
    return _Viewer().view(model)


def structure(model: nn.Module) -> tuple[list[nn.Module], list[tuple]]:
    """The modules of a model and the state of its adapters, to be compared with those of a later
    moment: where they differ, the views of the model are out of date.
    """
    return list(model.modules()), adapters_of(model)


def adapters_of(model: nn.Module) -> list[tuple]:
    """Which adapters of PEFT are active, disabled and merged in each layer that has some: numbers
    of Python's, which a view of the model would not follow.
    """
    found = []
    for module in model.modules():
        if hasattr(module, "active_adapters") and hasattr(module, "merged_adapters"):
            names = tuple(module.active_adapters), tuple(module.merged_adapters)
            found.append((*names, bool(getattr(module, "disable_adapters", False))))
    return found


def wrap_forward(module: nn.Module, around: Callable) -> None:
    """Makes `module(...)` call `around(forward, *args, **kwargs)`; only for modules of a view."""
    module.forward = partial(around, module.forward)


_SHARED = {"_parameters", "_buffers", "_non_persistent_buffers_set"}
"""Dictionaries that a module shares with its view, beside those of hooks."""


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
        if type(value) is dict:
            return {key: self.view(item) for key, item in value.items()}
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, self.view(value.__self__))
        if isinstance(value, partial):
            args = (self.view(item) for item in value.args)
            keywords = {key: self.view(item) for key, item in value.keywords.items()}
            return partial(self.view(value.func), *args, **keywords)
        return value

    def _view_of_module(self, module: nn.Module) -> nn.Module:
        other = object.__new__(type(module))
        self._views[id(module)] = other
        for name, value in vars(module).items():
            is_shared = name in _SHARED or "_hooks" in name
            if name == "_compiled_call_impl":
                value = None  # it would run the model instead of the view
            other.__dict__[name] = value if is_shared else self.view(value)
        return other
