"""What a call looks at of a model, to see whether it is still the one that was tried."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from specdec import torch_names
from specdec.graphs.tree import modules_of
from specdec.hf.foreign import has_own_code
from specdec.hf.forward import code_of
from specdec.targets.trial.witness import is_same_reading, read_little


def structure(model: nn.Module) -> tuple[list[nn.Module], list[tuple]]:
    """The modules of a model and the state of its adapters, to be compared with those of a later
    moment: where they differ, the views of the model are out of date.

    The state is which adapters of PEFT are active, disabled and merged in each layer that has some,
    and by what they are scaled: numbers of Python's, which a view would not follow. PEFT's layers
    have all that is asked for in their class, where a missing attribute costs a tenth of what it
    costs in a module.
    """
    modules, adapters = modules_of(model), []
    kinds = {kind: hasattr(kind, "active_adapters") for kind in {*map(type, modules)}}
    for module in modules:
        if kinds[type(module)] and hasattr(module, "merged_adapters"):
            names = tuple(module.active_adapters), tuple(module.merged_adapters)
            scaling = tuple(getattr(module, "scaling", {}).items())
            adapters.append((*names, scaling, bool(getattr(module, "disable_adapters", False))))
    return modules, adapters


class Surface:
    """All of a model that its views do not follow by themselves, to be compared with itself at a
    later moment, in less than a millisecond: attributes of modules and their classes, hooks,
    configurations, and functions that are looked up by name.

    Somebody's own code may also follow a switch that nobody can see. Where there is some, a few
    tokens are read by HF's code, and read once more at the later moment.

    Args:
        model: without wrappers.
    """

    def __init__(self, model: PreTrainedModel):
        self._seen = self._look(model)
        self._read = read_little(model) if has_own_code(model) else None

    def has_changed(self, model: PreTrainedModel) -> bool:
        """Whether it looks or reads otherwise than at first."""
        try:
            if self._seen != self._look(model):  # of the same objects, without looking into them
                return True
        except (RuntimeError, ValueError):  # a tensor or an array in the place of another
            return True
        return self._read is not None and not is_same_reading(self._read, read_little(model))

    def _look(self, model: PreTrainedModel) -> list:
        modules = modules_of(model)
        configs = {id(m.config): m.config for m in modules if isinstance(m, PreTrainedModel)}
        values = [copied_values(config) for config in configs.values()]
        attributes = [value for module in modules for value in vars(module).values()]
        return [hooks_of(modules), code_of(modules), values, attributes]


def hooks_of(modules: Sequence[nn.Module]) -> list[tuple[dict, dict]]:
    """The dictionaries of hooks of these modules, and of all, that are not empty, each with a copy
    of itself as it is now, but for hooks of one call (`activation_in`).
    """
    tables = torch_names.hooks_of_all_modules(), *map(torch_names.hooks_of, modules)
    found = [hooks for pair in tables for hooks in pair if hooks]
    own = [{n: h for n, h in hooks.items() if activation_in(h) is None} for hooks in found]
    return [pair for pair in zip(found, own, strict=True) if pair[1]]


ACTIVATED = "alora_offsets"
"""PEFT's keyword of Activated LoRA, and the row input of that name."""


def activation_in(hook: object) -> list[int | None] | None:
    """What PEFT's `generate` says to layers of Activated LoRA by a hook of one call, which does not
    change the model: private views are told by a row input.
    """
    return hook.keywords.get(ACTIVATED) if isinstance(hook, partial) else None


@contextmanager
def without_activation(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Without such hooks, which are of the rows of one call."""
    before = [(hooks, dict(hooks)) for hooks in map(torch_names.pre_hooks_of, modules)]
    for hooks, kept in before:
        for number, hook in kept.items():
            if activation_in(hook) is not None:
                del hooks[number]
    try:
        yield
    finally:
        for hooks, kept in before:
            hooks.clear()
            hooks.update(kept)


def copied_values(config: object) -> object:
    """A copy of a configuration's values and its class, configurations in it likewise."""
    # HF's own comparison raises an error where layers differ in the width of their heads.
    if not isinstance(config, PreTrainedConfig):
        return copy.deepcopy(config)
    return type(config), {name: copied_values(value) for name, value in vars(config).items()}


def refuse_adapters_by_row(modules: Iterable[nn.Module]) -> None:
    """Raises `ValueError` under PEFT's `adapter_names=`: for one call, hooks of all layers hold a
    name for each row of the batch.
    """
    for module in modules:
        for hook in torch_names.pre_hooks_of(module).values():
            if isinstance(hook, partial) and "adapter_names" in hook.keywords:
                raise ValueError(
                    "adapter_names= works inside of model.generate, by hooks in the layers; write "
                    "generator.generate(..., row_inputs={'adapter': adapter_names}). PEFT's hooks "
                    "stay in the layers after an error: load the model again"
                )
