"""What is done with queries before they are multiplied by keys: some are features, and some have
temperatures of their own.
"""

import torch
from torch import Tensor

from specdec.slots.cache import Window
from specdec.types import Queries


def note_queries(window: Window, name: Queries, query: Tensor, scaling: float | None) -> None:
    """Notes a layer's queries `[B, Hq, N, D]` down as features of a window."""
    scaled = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    window.features[name] = scaled.transpose(1, 2).flatten(2)


def tempered(module: torch.nn.Module, query: Tensor, window: Window) -> Tensor:
    """Queries times the temperature of their positions, as Llama 4 has it; HF counts positions from
    one length of all rows, so in views it leaves the temperature out.
    """
    steps = torch.floor((window.text_positions.to(query.device).float() + 1.0) / module.floor_scale)
    scales = torch.log1p(steps) * module.attn_scale + 1.0
    return (query * scales[:, None, :, None]).to(query.dtype)
