"""A model's forward: the arguments that it takes, whether its prompts see themselves both ways, and
the device it computes on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

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
    from specdec.hf.versions import newer_than_tried

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
