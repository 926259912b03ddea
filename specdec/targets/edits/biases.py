"""Biases by the distance of keys (ALiBi), which BLOOM and Falcon make from a padding mask.

Their modelling files take the number of keys from a mask `[B, W]`, and a window's mask has other
dimensions. In a view they are made for all slots, each at its own position. MPT cuts its biases
from one table, and needs no edit.

Source: Press et al., "Train Short, Test Long", arXiv:2108.12409, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.hf.forward import without_renaming
from specdec.targets.view import own_copy

BIASES = "build_alibi_tensor"
"""Given a padding mask, a number of heads and a data type: a method of BLOOM's decoder, and a
function that the forward of Falcon's calls.
"""


def edit(view: PreTrainedModel, attention: str | None = None) -> None:
    """Makes these decoders of a private view build biases over slots. A forward that somebody has
    replaced stays.
    """
    for module in view.modules():
        if hasattr(type(module), BIASES):
            setattr(module, BIASES, partial(_over_slots, getattr(module, BIASES)))
        elif getattr(module, "use_alibi", False) and "forward" not in vars(module):
            forward = without_renaming(type(module).forward)
            if (build := _function_of(forward)) is not None:
                forward = own_copy(forward, {BIASES: partial(_over_slots, build)})
                module.forward = MethodType(forward, module)


def _function_of(forward: FunctionType) -> Callable | None:
    """That the forward calls; `None` if it calls none."""
    return forward.__globals__.get(BIASES) if BIASES in forward.__code__.co_names else None


def _over_slots(build: Callable, mask: Tensor, *args, **kwargs) -> Tensor:
    """Biases `[B heads, 1, W]`, for a window's mask `[B, 1, N, W]`."""
    if mask.dim() == 4:
        mask = torch.ones(len(mask), mask.shape[-1], dtype=torch.long, device=mask.device)
    return build(mask, *args, **kwargs)
