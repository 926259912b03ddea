"""Attention that a model computes by a method of its own, and not through HF's interface (GPT-Neo,
GPT-NeoX Japanese).

GPT-Neo masks by a buffer, of which it takes the last rows for the queries of a call: its local
layers count from the number of keys. GPT-NeoX Japanese needs its keys in one block of memory. In a
view that method calls an attention function of specdec's, and local layers have sliding windows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.hf.layers import OWN_ATTENTION
from specdec.slots.attention import sees
from specdec.targets.attention import ATTENTION, slot_attention
from specdec.targets.trial.probe import PROBE, HFMask, probe_attention
from specdec.targets.view import wrap_forward

"""Of these modules, given queries, keys, values and a mask."""
FUNCTIONS = {ATTENTION: slot_attention, PROBE: probe_attention}


def edit(view: PreTrainedModel, attention: str | None) -> None:
    """Makes these modules of a private view attend by a function of specdec's.

    Args:
        view: of `private_view`.
        attention: of its `Route`; with `None` these modules run as HF has them, by a dense mask.
    """
    own = (module for module in view.modules() if hasattr(type(module), OWN_ATTENTION))
    scalings = {module: scaling for module in own if (scaling := _scaling(module)) is not None}
    if attention not in FUNCTIONS or not scalings:
        return
    current = threading.local()
    wrap_forward(view, partial(_keep_window, current))
    for module, scaling in scalings.items():
        if hasattr(module, "layer_id"):
            module.layer_idx = module.layer_id
        call = partial(FUNCTIONS[attention], module, scaling=scaling)
        setattr(module, OWN_ATTENTION, partial(_attend, call, current, local_mask(module)))


def _scaling(module: nn.Module) -> float | None:
    """Of the scores; `None` for a module of another family."""
    if hasattr(module, "attention_type"):  # GPT-Neo
        return 1.0
    return 1.0 / module.norm_factor if hasattr(module, "dense_bias") else None


def local_mask(module: nn.Module) -> HFMask | None:
    """What a local layer of GPT-Neo sees, as its buffer of booleans has it; `None` for others."""
    if getattr(module, "attention_type", None) != "local":
        return None
    size, buffer = module.config.window_size, module.bias[0, 0]
    last = buffer.shape[0] - 1

    def visible(row: int, head: int, queries: Tensor, keys: Tensor) -> Tensor:
        has_both = (queries <= last) & (keys <= last)  # the model has no positions after these
        found = buffer[queries.clamp(max=last), keys.clamp(max=last)]
        return torch.where(has_both, found, sees(queries, keys, size))

    return HFMask(size, visible)


def _keep_window(current: threading.local, forward: Callable, *args, slot_window=None, **kwargs):
    """Models do not hand it on to these modules."""
    current.window = slot_window
    try:
        return forward(*args, **kwargs)
    finally:
        current.window = None


def _attend(
    call: Callable,
    current: threading.local,
    mask: HFMask | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | HFMask | None = None,
) -> tuple[Tensor, None]:
    """In the place of the method; `[B, heads, N, D]`, and `None` for attention weights."""
    if isinstance(attention_mask, HFMask) and mask is not None:
        attention_mask = mask
    out, _ = call(query, key, value, attention_mask, slot_window=current.window)
    return out.transpose(1, 2), None
