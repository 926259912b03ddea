"""`FeatureHead`: a head over the target's features, joined to one hidden state; `FusingLayer`: the
layer in which that state meets embeddings.

Legend: B rows, N tokens of a pass, H width of the head, F width of all features together, V target
vocabulary, Vd ids that the head can propose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.drafters.head.layers import Attend, Attention, GatedMLP, RMSNorm, apply_lm_head

if TYPE_CHECKING:
    from specdec.drafters.head.feature_config import FeatureHeadConfig
    from specdec.drafters.head.layer_config import LayerConfig


class FeatureHead(nn.Module, ABC):
    """What heads over joined features of a target have in common: norms and `fc` before their
    layers, a norm and a vocabulary head after them, under the names of the public checkpoints.
    `target_ids` `[Vd]` int64 (see `check_target_ids`) is a buffer outside the state dict.
    """

    def __init__(self, config: FeatureHeadConfig, target_ids: Tensor | None = None):
        from specdec.drafters.head.decoder_layer import build_layer
        from specdec.drafters.head.sharing import check_target_ids

        super().__init__()
        self.config, self._feature_width = config, config.feature_width
        self._joins_features = config.joins_features
        width, eps = config.hidden_size, config.layer.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.feature_width, eps)
        if config.fc_norm:
            norms = (RMSNorm(config.target_hidden_size, eps) for _ in config.feature_layers)
            self.fc_norm = nn.ModuleList(norms)
        if config.fc_width is not None:
            self.fc = nn.Linear(config.fc_width, width, bias=config.fc_bias)
        later = (build_layer(config.layer, index) for index in range(1, config.num_layers))
        self.layers = nn.ModuleList([self.build_first_layer(), *later])
        if config.output_norm:
            self.norm = RMSNorm(width, eps)
        if config.has_lm_head and not config.ties_embeddings:
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if config.has_embed_tokens:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.register_buffer("target_ids", check_target_ids(target_ids, config), persistent=False)

    @abstractmethod
    def build_first_layer(self) -> nn.Module:
        """The first layer, in which families differ; the others are plain ones."""

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self.layers[0].mlp.down_proj.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.layers[0].mlp.down_proj.weight.device

    def fuse(self, features: Tensor) -> Tensor:
        """Features `[B, N, F]` of the target as hidden states `[B, N, H]`: norms, then `fc`.
        Without `fc`, or with one that reads the embedding as well, they are only normalised.
        """
        config = self.config
        if features.shape[-1] != self._feature_width:
            from specdec.drafters.head.check import refuse_width

            refuse_width(config, features.shape[-1])
        features = features.to(self.dtype)
        if config.norm_before_fc:
            features = self.input_norm(features)
        if config.fc_norm:
            pieces = features.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(piece) for norm, piece in zip(self.fc_norm, pieces, strict=True)]
            features = torch.cat(normed, dim=-1)
        return self.fc(features) if self._joins_features else features

    def normed(self, out: Tensor) -> Tensor:
        """Outputs `[B, N, H]` as the vocabulary head reads them."""
        return self.norm(out) if self.config.output_norm else out

    def unembed(self, normed: Tensor, lm_head: nn.Module | None = None) -> Tensor:
        """Logits `[B, N, Vd]`, over the ids that the head can propose, of `normed` outputs `[B, N,
        H]`; `lm_head` is the target's, for a head that has none of its own.
        """
        config = self.config
        if config.ties_embeddings:
            logits = F.linear(normed, self.embed_tokens.weight[: config.draft_vocab_size])
        elif config.has_lm_head:
            logits = self.lm_head(normed)
        else:
            logits = apply_lm_head(lm_head, normed)
        return logits if config.logit_scale == 1 else logits * config.logit_scale

    def logits(self, out: Tensor, lm_head: nn.Module | None = None) -> Tensor:
        """`unembed` of outputs `[B, N, H]` as the layers leave them."""
        return self.unembed(self.normed(out), lm_head)

    def over_target_ids(self, logits: Tensor) -> Tensor:
        """Logits `[B, N, Vd]` over the target's vocabulary, `[B, N, V]`; ids that the head cannot
        propose get `-inf`.
        """
        if self.target_ids is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return wide.index_copy(-1, self.target_ids, logits)


class FusingLayer(nn.Module):
    """A first layer whose attention reads the embedding beside the hidden state (EAGLE-3, P-EAGLE).

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
