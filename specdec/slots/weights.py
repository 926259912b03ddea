"""Attention with soft caps or sinks, whose weights PyTorch's own attention does not have."""

import torch
from torch import Tensor

from specdec.kernels.types import AttentionOptions


def attend_by_weights(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, options: AttentionOptions
) -> Tensor:
    """`attend` with an additive mask."""
    scale, softcap, sinks, *_ = options
    groups = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask  # [B, Hq, N, S']
    if sinks is not None:
        sinks = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    wide = torch.promote_types(torch.float32, query.dtype)
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    return (weights[..., : values.shape[2]] @ values).transpose(1, 2)
