"""Families: parts of models that need code of their own to run over slots. Each is a row here and a
file in `edits/`, which is imported where a model has such a part, and by no other model.

A file of a family has `edit(view, attention)`, which changes a private view, and where it matters:
`stored(view, layers)`, what it stores of a token beside keys and values, seen in the layers of HF's
own cache; `choose_few(view)`, which makes a view choose so few keys that a short text shows which;
`least_tokens(model, route)`, tokens of the texts that show in a self-test what it does;
`compared(model)`, names of modules whose output a self-test compares; `rows_of_trial(model, view,
texts)`, row inputs of a self-test's texts; `notes(model)`, of a route; `inputs_of(model)`, names of
row inputs. A file of `FASTER` has a class `Faster`, made by its `of(model)`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import chain
from types import ModuleType

from torch import nn
from transformers import PreTrainedModel

from specdec.hf.layers import EXPERTS, OWN_ATTENTION, SPARSE, has_compressor, reads_chosen_keys
from specdec.targets.view import private_view

Mark = Callable[[nn.Module], bool]
"""Whether a module is a part of the family."""


def _has(*names: str) -> Mark:
    return lambda module: all(hasattr(module, name) for name in names)


def _is_peft(module: nn.Module) -> bool:
    return type(module).__module__.startswith("peft.")


def has_quantised_weight(module: nn.Module) -> bool:
    """Of torchao's."""
    return hasattr(getattr(module, "weight", None), "qdata")


FAMILIES: dict[str, Mark] = {
    "indexed": reads_chosen_keys,  # DeepSeek-V3.2, GLM 5
    "compressed": has_compressor,  # DeepSeek-V4
    "own_attention": _has(OWN_ATTENTION),  # GPT-Neo, GPT-NeoX Japanese
    "biases": lambda m: hasattr(m, "build_alibi_tensor") or getattr(m, "use_alibi", False),
    "heads": _has("new_decoder_architecture"),  # Falcon
    "convolutions": _has("forget_gate"),  # Kimi Linear, Ling 2.5
    "streams": _has(SPARSE),  # Gemma 3n
    "adapters": _is_peft,
    "cross": _has("reads_source"),  # encoder-decoders
}
"""In the order in which views are edited."""
FASTER: dict[str, Mark] = {"experts": _has(*EXPERTS), "latents": _has("expand_kv")}
"""Likewise what makes a model faster, and is given up where it does not pass the self-test."""


def families_of(model: nn.Module, table: dict[str, Mark] = FAMILIES) -> list[ModuleType]:
    """The files of the families that a model has parts of."""
    modules = [*model.modules()]
    names = [name for name, mark in table.items() if any(map(mark, modules))]
    return [import_module(f"specdec.targets.edits.{name}") for name in names]


def asked(model: nn.Module, question: str, *more: object) -> list:
    """What the files of a model's families answer, those that have a function of this name."""
    functions = (getattr(family, question, None) for family in families_of(model))
    return [function(model, *more) for function in functions if function is not None]


def row_inputs_of(model: nn.Module) -> tuple[str, ...]:
    """Names of what a call may bring for each row of a model."""
    return tuple(chain(*asked(model, "inputs_of")))


def choosing_few(model: PreTrainedModel) -> PreTrainedModel | None:
    """A view of a model that chooses few keys or entries, so that short texts show which; `None`
    for a model that chooses nothing.
    """
    view = private_view(model)
    return view if any(asked(view, "choose_few")) else None
