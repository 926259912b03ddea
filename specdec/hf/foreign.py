"""Whose code runs in a model: transformers' own, that of packages which are known, or somebody
else's, which may depend on how a text is cut into calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from functools import partial

from transformers import PreTrainedModel

from specdec.graphs.tree import modules_of
from specdec.hf.generation import SAMPLE
from specdec.hf.lookups import (
    attention_functions,
    attention_homes,
    attention_names,
    code_of,
    mask_functions,
)
from specdec.torch_names import HOOKS_OF_ALL_MODULES, hooks_of


def foreign_attention(model: PreTrainedModel) -> str | None:
    """The attention function that a model calls, if it is none of HF's and none of the model's own
    file: one that was registered, or put in the place of HF's.
    """
    return _first_foreign(attention_functions, model)


def foreign_masks(model: PreTrainedModel) -> str | None:
    """The same of what makes its masks."""
    return _first_foreign(mask_functions, model)


def _first_foreign(functions: Callable, model: PreTrainedModel) -> str | None:
    modules = modules_of(model)
    for home in attention_homes(modules):
        for function in functions([home], attention_names(modules)):
            origin = home_of(function)
            if origin != home.__name__ and not origin.startswith("transformers."):
                name = getattr(function, "__qualname__", type(function).__name__)
                return f"{origin}.{name}".removeprefix(".")
    return None


def home_of(function: object) -> str:
    """The module whose code a function is; `__module__` is what functools.wraps copies."""
    return getattr(function, "__globals__", {}).get("__name__", "")


TRUSTED = {
    *("transformers", "torch", "accelerate", "peft", "torchao", "bitsandbytes"),
    *("huggingface_hub", "safetensors", "numpy", "packaging", "tqdm"),
}
"""Packages whose code in a model treats all tokens of a call alike, or is unsupported by its name;
and those whose functions transformers' files import for other work.
"""
KNOWN = TRUSTED | sys.stdlib_module_names
OF_DECODERS = {"specdec.hf.encoders", "specdec.hf.forward"}
"""Files of this library whose functions the decoder of an encoder-decoder calls. They and its class
are all of it that is trusted, and in such models alone.
"""


def has_own_code(model: PreTrainedModel) -> bool:
    """Whether anything runs in a model that is of no package that is known: hooks, functions in the
    place of forwards, classes, methods and functions of somebody else's.
    """
    modules = modules_of(model)
    running = [hook for table in HOOKS_OF_ALL_MODULES for hook in table.values()]
    running += [*code_of(modules), *(getattr(model, name, None) for name in GENERATING)]
    for module in modules:
        running += (hook for table in hooks_of(module) for hook in table.values())
        running.append(vars(module).get("forward"))
    home = type(model).__module__
    ours = {home, *OF_DECODERS} if home.startswith("specdec.") else set()
    known = all(_is_trusted(code, ours) for code in running)
    return foreign_attention(model) is not None or not known


def _is_trusted(code: object, ours: Collection[str]) -> bool:
    """Whether code, and what it is wrapped around (by `torch.no_grad`, by accelerate), are of known
    packages, or of these modules of this library.
    """
    if isinstance(code, type) or not callable(code):
        return True
    if isinstance(code, partial):  # accelerate's way; of HF's own functions it changes arguments
        is_known = home_of(code.func).startswith(("accelerate.", "peft."))
    else:
        home = home_of(getattr(code, "__func__", code)) or type(code).__module__
        is_known = home.split(".")[0] in KNOWN or home in ours
    return is_known and _is_trusted(getattr(code, "__wrapped__", None), ours)


GENERATING = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation", SAMPLE
"""Methods that HF's `generate` calls between forwards."""


def foreign_method(model: PreTrainedModel, name: str) -> bool:
    """Whether a method of a model is none of transformers'."""
    method = getattr(model, name, None)
    return method is not None and not is_of_hf(method)


def is_of_hf(method: object) -> bool:
    """Whether a method is transformers', and so is all that wraps it, but for torch's `no_grad`."""
    function = getattr(method, "__func__", method)
    home, inner = home_of(function), getattr(function, "__wrapped__", None)
    if inner is None:
        return home.startswith("transformers.")
    return home.startswith(("transformers.", "torch.")) and is_of_hf(inner)
