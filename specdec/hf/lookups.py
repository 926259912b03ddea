"""What a model looks up by name while it runs: attention and mask functions, and its own code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType

import torch
from torch import nn
from transformers import AttentionMaskInterface, PreTrainedModel

ATTENTION_FIELD = "_attn_implementation_internal"
"""Field of a configuration with the attention function that its layers look up."""


def attention_of(config: object) -> str | None:
    """The attention function that a configuration asks for."""
    return getattr(config, ATTENTION_FIELD, None)


def attention_homes(modules: Sequence[nn.Module]) -> list[ModuleType]:
    """The modelling files whose attention modules, of these, look a function up by name."""
    kinds = {kind for own in {*map(type, modules)} for kind in own.__mro__}
    homes = {sys.modules.get(kind.__module__) for kind in kinds}
    found = (home for home in homes if hasattr(home, "ALL_ATTENTION_FUNCTIONS"))
    return sorted(found, key=lambda home: home.__name__)


def attention_names(modules: Sequence[nn.Module]) -> list[str]:
    """Names of the attention functions that the configurations of models among these ask for."""
    configs = (module.config for module in modules if isinstance(module, PreTrainedModel))
    names = dict.fromkeys(attention_of(config) for config in configs)
    return [name for name in names if name is not None]


def attention_functions(homes: Sequence[ModuleType], names: Sequence[str]) -> list[Callable]:
    """What attention modules of these files call where the configuration asks for these names."""
    functions = (
        home.ALL_ATTENTION_FUNCTIONS.get(name) or getattr(home, "eager_attention_forward", None)
        for home in homes
        for name in names
        if "/" not in name  # a kernel of the hub, which HF has loaded
    )
    return [function for function in functions if function is not None]


def mask_functions(homes: Sequence[ModuleType], names: Sequence[str]) -> list[Callable]:
    """What makes the masks of models of these files where the configuration asks for these names:
    functions that are registered, and those that the files call.
    """
    registered = (AttentionMaskInterface().get(name) for name in names)
    called = (
        value
        for home in homes
        for name, value in vars(home).items()
        if name.startswith("create_") and "mask" in name and callable(value)
    )
    return [function for function in (*registered, *called) if function is not None]


def code_of(modules: Sequence[nn.Module]) -> list[object]:
    """What the code of a model with these modules looks up by name while it runs: all that its
    classes hold, functions of the files that these are written in and of `torch.nn.functional`,
    and the attention and mask functions that its configurations ask for.
    """
    kinds = {kind for own in {*map(type, modules)} for kind in own.__mro__}
    kinds = sorted((k for k in kinds if k.__module__.split(".")[0] not in _TORCH), key=id)
    homes = {home for kind in kinds if (home := sys.modules.get(kind.__module__))}
    files = *sorted(homes, key=id), torch.nn.functional
    # What Dynamo compiles it leaves in these files, as `__compiled_fn_...`, and calls by itself.
    functions = [
        value
        for file in files
        for name, value in vars(file).items()
        if type(value) is FunctionType and not name.startswith("__")
    ]
    held = [value for kind in kinds for value in vars(kind).values()]
    looked_up = attention_homes(modules), attention_names(modules)
    return held + functions + attention_functions(*looked_up) + mask_functions(*looked_up)


_TORCH = "torch", "builtins"
