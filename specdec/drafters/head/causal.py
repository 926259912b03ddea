"""Attention without a cache, over whole texts: for training and oracles."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels import AttentionOptions
from specdec.kernels.types import CAUSAL
from specdec.slots.attention import attend
from specdec.slots.cache import Window


def attend_causally(
    index: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions = CAUSAL
) -> Tensor:
    """Attention without a cache: each token sees itself and those before it (`Attend`).

    Example:
        >>> q, kv = torch.randn(1, 4, 3, 2), torch.randn(1, 2, 3, 2)
        >>> attend_causally(0, q, kv, kv)[:, :2, 0].equal(kv[:, [0, 0], 0])
        True
    """
    if options == CAUSAL:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    slots = torch.arange(query.shape[2], device=query.device)[None]
    return attend(Window(slots, query.shape[2]), query, key, value, options).transpose(1, 2)
