"""Convolutions of linear attention over one token (Kimi Linear, Ling 2.5, GLM-5-next).

HF's way for a single token shifts the inputs of the convolution in place, whether or not the token
is kept, and asks no cache for them all, as other families do (`Cache.is_recording_past`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from torch import nn

from specdec.slots.cache import SlotCache
from specdec.targets.view import wrap_forward

GATE = "forget_gate"
"""A part of their modules."""


def edit(view: nn.Module, attention: str | None = None) -> None:
    """Makes these modules of a private view read one token as they read several."""
    for module in view.modules():
        if hasattr(module, GATE):
            wrap_forward(module, _as_several)


def _as_several(forward: Callable, *args, **kwargs):
    def shown(cache: SlotCache) -> SimpleNamespace:
        return SimpleNamespace(
            get_conv_state=lambda *place, **named: None,  # `update_conv_state` has it, too
            update_conv_state=cache.update_conv_state,
            get_recurrent_state=cache.get_recurrent_state,
            update_recurrent_state=cache.update_recurrent_state,
        )

    return with_cache(shown, forward, args, kwargs)


def with_cache(shown: Callable, forward: Callable, args: tuple, kwargs: dict):
    """A forward that is given another object in the place of a cache of slots."""

    def of(value):
        return shown(value) if isinstance(value, SlotCache) else value

    return forward(*map(of, args), **{name: of(value) for name, value in kwargs.items()})
