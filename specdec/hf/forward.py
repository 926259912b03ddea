"""A model's forward: the arguments that it takes, whether its prompts see themselves both ways, the
device it computes on, and all that it looks up by name while it runs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType

import torch
from torch import nn
from transformers import AttentionMaskInterface, PreTrainedModel

from specdec.hf.layers import attention_of
from specdec.hf.versions import newer_than_tried
from specdec.torch_names import parameters_of

CACHES = "cache", "past_key_values", "cache_params"
"""Names of a forward's argument for its cache: from 5.24 on, before, and of purely recurrent models
before.
"""


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which a model's forward takes its cache.

    Raises:
        ValueError: it has none of the names that are known.
    """
    parameters = forward_arguments(model)
    for name in CACHES:
        if name in parameters:
            return name
    raise ValueError(
        f"{type(model).__name__} cannot be decoded: its forward has no argument for HF's cache "
        f"({', '.join(CACHES)}){newer_than_tried()}. Use HF generate for this model"
    )


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether a model's forward can be told where tokens stand."""
    return "position_ids" in forward_arguments(model)


def forward_arguments(model: nn.Module) -> frozenset[str]:
    """Names that a model's forward takes: of its class, since an instance's forward may have been
    replaced by a function of any arguments. A class of somebody's own with `**kwargs` passes what
    it does not name on to the class that it is derived from.
    """
    names: set[str] = set()
    for kind in type(model).__mro__:
        if forward := vars(kind).get("forward"):
            parameters = inspect.signature(forward).parameters
            names.update(parameters)
            is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            if kind.__module__.startswith("transformers.") or not is_open:
                break
    return frozenset(names)


def without_renaming(forward: Callable) -> Callable:
    """A forward without the wrapper that takes arguments under their old names (5.24)."""
    while forward.__globals__["__name__"] == "transformers.utils.deprecation":
        forward = forward.__wrapped__
    return forward


PREFIX_LMS = {"paligemma"}
"""Model types whose whole prompt sees itself both ways. By which mask it does depends on types of
tokens, on padding and on the attention function, and without types HF masks text otherwise in a
batch than alone.
"""


def is_prefix_lm(model: PreTrainedModel) -> bool:
    """Whether what a token of a prompt sees depends on more than what stands before it."""
    return model.config.model_type in PREFIX_LMS


OFFLOADING = "_hf_hook"
"""Accelerate's attribute of a module with hooks; without it, offloaded models raise the error of
models on the meta device.
"""


def device_of(module: nn.Module) -> torch.device | None:
    """Where a module computes: the device of its first weight, or, where that is offloaded, the one
    to which accelerate's hook brings it. `None` for a module without weights.
    """
    for part in module.modules():
        for weight in parameters_of(part).values():
            if weight is not None and not weight.is_meta:
                return weight.device
            hook = None if weight is None else getattr(part, OFFLOADING, None)
            for one in getattr(hook, "hooks", [hook]):  # a `SequentialHook` has several
                if getattr(one, "execution_device", None) is not None:
                    return torch.device(one.execution_device)
    return next((weight.device for weight in module.parameters()), None)


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
