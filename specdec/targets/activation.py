"""What PEFT says to its layers by hooks of one call, which do not change a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import nn

from specdec.torch_names import pre_hooks_of

ACTIVATED = "alora_offsets"
"""PEFT's keyword of Activated LoRA, and the row input of that name."""


def activation_in(hook: object) -> list[int | None] | None:
    """What PEFT's `generate` says to layers of Activated LoRA by a hook of one call, which does not
    change the model: private views are told by a row input.
    """
    return hook.keywords.get(ACTIVATED) if isinstance(hook, partial) else None


def lasting(hooks: dict) -> dict:
    """A dictionary of hooks without such hooks."""
    return {name: hook for name, hook in hooks.items() if activation_in(hook) is None}


@contextmanager
def without_activation(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Without such hooks, which are of the rows of one call."""
    before = [(hooks, dict(hooks)) for hooks in map(pre_hooks_of, modules)]
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


def refuse_adapters_by_row(modules: Iterable[nn.Module]) -> None:
    """Raises `ValueError` under PEFT's `adapter_names=`: for one call, hooks of all layers hold a
    name for each row of the batch.
    """
    for module in modules:
        for hook in pre_hooks_of(module).values():
            if isinstance(hook, partial) and "adapter_names" in hook.keywords:
                raise ValueError(
                    "adapter_names= works inside of model.generate, by hooks in the layers; write "
                    "generator.generate(..., row_inputs={'adapter': adapter_names}). PEFT's hooks "
                    "stay in the layers after an error: load the model again"
                )
