"""How heads read the target's features: joined to one hidden state, and fused with embeddings.

Legend: B rows, N tokens of a pass, H width of the head, F width of all features together.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specdec.heads.config import LayerConfig
from specdec.heads.layers import Attend, Attention, GatedMLP, RMSNorm


class JoinsFeatures(Protocol):
    """A head as `join_features` sees it: `config` has `feature_layers`, `target_hidden_size` and
    `feature_width`; modules `input_norm`, `fc_norm` and `fc` are there where the head has them.
    """

    config: Any
    dtype: torch.dtype


def join_features(head: JoinsFeatures, features: Tensor) -> Tensor:
    """Features `[B, N, F]` of the target as hidden states `[B, N, H]`: norms, then `fc`.

    Args:
        head: whose modules are used. Without `fc` (or with one that reads the embedding as well,
            `fusion="input"`) features are only normalised.
        features: `[B, N, F]`.

    Raises:
        ValueError: features of another width.
    """
    config = head.config
    if features.shape[-1] != config.feature_width:
        raise ValueError(
            f"the head reads {len(config.feature_layers)} features of width "
            f"{config.target_hidden_size}, {config.feature_width} in all, and the target's are "
            f"{features.shape[-1]} wide; it was made for another target"
        )
    features = features.to(head.dtype)
    if config.norm_before_fc:
        features = head.input_norm(features)
    if config.fc_norm:
        pieces = features.chunk(len(head.fc_norm), dim=-1)
        normed = [norm(piece) for norm, piece in zip(head.fc_norm, pieces, strict=True)]
        features = torch.cat(normed, dim=-1)
    return head.fc(features) if config.joins_features else features


class FusingLayer(nn.Module):
    """A first layer whose attention reads the embedding beside the hidden state (EAGLE-3, P-EAGLE).

    Args:
        layer: sizes and flags.
        norm_before_residual: the residual stream is the normalised hidden state.

    Reference: Li et al., arXiv:2503.01840, Fig. 5.
    """

    def __init__(self, layer: LayerConfig, *, norm_before_residual: bool = False):
        super().__init__()
        width, eps = layer.hidden_size, layer.rms_norm_eps
        self.self_attn = Attention(layer, 0, 2 * width)
        self.mlp = GatedMLP(layer)
        self.input_layernorm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.norm_before_residual = norm_before_residual

    def forward(self, embeds: Tensor, hidden: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        """`[B, N, H]`, given embeddings and hidden states `[B, N, H]`."""
        normed = self.hidden_norm(hidden)
        fused = torch.cat([self.input_layernorm(embeds), normed], dim=-1)  # [B, N, 2 H]
        residual = normed if self.norm_before_residual else hidden
        hidden = residual + self.self_attn(fused, angles, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
