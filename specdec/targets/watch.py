"""What a call looks at of a model, to see whether it is still the one that was tried."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from specdec import torch_names
from specdec.graphs.tree import modules_of
from specdec.hf.lookups import code_of


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
        from specdec.hf.foreign import has_own_code  # once per model, as all that tries it
        from specdec.targets.trial.witness import read_little

        self._seen = self._look(model)
        self._read = read_little(model) if has_own_code(model) else None

    def has_changed(self, model: PreTrainedModel) -> bool:
        """Whether it looks or reads otherwise than at first."""
        try:
            if self._seen != self._look(model):  # of the same objects, without looking into them
                return True
        except (RuntimeError, ValueError):  # a tensor or an array in the place of another
            return True
        return self._read is not None and self._reads_otherwise(model)

    def _reads_otherwise(self, model: PreTrainedModel) -> bool:
        from specdec.targets.trial.witness import is_same_reading, read_little

        return not is_same_reading(self._read, read_little(model))

    def _look(self, model: PreTrainedModel) -> list:
        modules = modules_of(model)
        configs = {id(m.config): m.config for m in modules if isinstance(m, PreTrainedModel)}
        values = [copied_values(config) for config in configs.values()]
        attributes = [value for module in modules for value in vars(module).values()]
        return [hooks_of(modules), code_of(modules), values, attributes]


def hooks_of(modules: Sequence[nn.Module]) -> list[tuple[dict, dict]]:
    """The dictionaries of hooks of these modules, and of all, that are not empty, each with a copy
    of itself as it is now, but for hooks of one call (`activation.py`).
    """
    tables = torch_names.HOOKS_OF_ALL_MODULES, *map(torch_names.hooks_of, modules)
    found = [hooks for pair in tables for hooks in pair if hooks]
    if not found:
        return []
    from specdec.targets.activation import lasting

    return [(hooks, own) for hooks in found if (own := lasting(hooks))]


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody's own code runs in a module: a forward hook, or a forward of its own."""
    return any(torch_names.hooks_of(module)) or "forward" in vars(module)


def copied_values(config: object) -> object:
    """A copy of a configuration's values and its class, configurations in it likewise."""
    # HF's own comparison raises an error where layers differ in the width of their heads.
    if not isinstance(config, PreTrainedConfig):
        return copy.deepcopy(config)
    return type(config), {name: copied_values(value) for name, value in vars(config).items()}
