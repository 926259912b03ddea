"""Multi-token prediction heads: how one is wired (`MTPConfig`), and its weights (`MTPHead`).

Legend: B rows, N tokens of a pass, D depths, H width, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.arguments import check_choice, check_integer
from specdec.drafters.head.config import check_fields
from specdec.drafters.head.decoder_layer import build_layer
from specdec.drafters.head.hf_layer import HFLayerConfig
from specdec.drafters.head.layer_config import LayerConfig
from specdec.drafters.head.layers import RMSNorm, apply_lm_head
from specdec.drafters.head.window import Pass
from specdec.types import FeatureLayer

Semantics = Literal["chain", "target"]


@dataclass(frozen=True)
class MTPConfig:
    """Sizes and flags of a head. Nothing in it depends on who trained it: loaders translate.

    Args:
        layer: of every depth: the library's own decoder layer, or one of an HF architecture.
        vocab_size: V.
        num_layers: D, depths; each has one decoder layer.
        target_state: the target's feature that the first depth reads: `"final"`, or hidden state L,
            the residual stream before the final norm.
        semantics: `"chain"`: depth d reads the output of depth d - 1 at the same index, as such
            heads are trained. `"target"`: every depth reads the target's feature.
        hidden_first: the projection reads [hidden, embedding] instead of [embedding, hidden].
        output_norm: each depth has a norm before its vocabulary head.
        feedback_norm: what the next depth (or the last depth again) reads is the normalised output,
            not the raw one.
        zero_first_embedding: the embedding beside the feature of position 0 is zero.
        centred_norms: norms of the head multiply by 1 + weight. Norms inside an HF layer are that
            layer's own.
        projection_bias: the projection has a bias.
        has_embed_tokens: the head has embeddings of its own; else it reads the target's table.
        has_lm_head: the head has vocabulary heads of its own; else it uses the target's.
        lm_head_per_depth: one for each depth, instead of one for all.

    Example:
        >>> config = MTPConfig(LayerConfig(8, 16, 2, 2, 4), vocab_size=9, num_layers=3)
        >>> config.feature_layers, config.hidden_size
        (('final',), 8)

    Reference: DeepSeek-AI, arXiv:2412.19437, section 2.2; Gloeckle et al., arXiv:2404.19737.
    """

    layer: LayerConfig | HFLayerConfig
    vocab_size: int
    num_layers: int = 1
    target_state: FeatureLayer = "final"
    semantics: Semantics = "chain"
    hidden_first: bool = False
    output_norm: bool = True
    feedback_norm: bool = True
    zero_first_embedding: bool = False
    centred_norms: bool = False
    projection_bias: bool = False
    has_embed_tokens: bool = False
    has_lm_head: bool = False
    lm_head_per_depth: bool = False

    def __post_init__(self):
        check_fields(self)
        check_choice("MTPConfig.semantics", self.semantics, ("chain", "target"))
        check_integer("num_layers", self.num_layers, 1)
        if self.feedback_norm and not self.output_norm:
            raise ValueError("feedback_norm feeds the output of the norm back: needs output_norm")
        if self.lm_head_per_depth and not self.has_lm_head:
            raise ValueError("lm_head_per_depth needs has_lm_head=True")

    @property
    def hidden_size(self) -> int:
        """H of the head."""
        return self.layer.hidden_size

    @property
    def target_hidden_size(self) -> int:
        """H of the target, which is the head's."""
        return self.layer.hidden_size

    @property
    def draft_vocab_size(self) -> int:
        """All ids of the target."""
        return self.vocab_size

    @property
    def feature_layers(self) -> tuple[FeatureLayer, ...]:
        """The one feature."""
        return (self.target_state,)


class CentredRMSNorm(nn.Module):
    """An RMS norm that multiplies by 1 + weight, in float32 (Gemma, Qwen3-Next, Step-3.5)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` to the same."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        scale = 1 + self.weight.to(dtype)
        return F.rms_norm(x.to(dtype), scale.shape, scale, self.eps).to(self.weight.dtype)


class MTPDepth(nn.Module):
    """One prediction module: norms of both inputs, their projection, a decoder layer, a norm."""

    def __init__(self, config: MTPConfig, index: int):
        super().__init__()
        width, layer = config.hidden_size, config.layer
        norm = CentredRMSNorm if config.centred_norms else RMSNorm
        self.hidden_first = config.hidden_first
        self.enorm = norm(width, layer.rms_norm_eps)
        self.hnorm = norm(width, layer.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=config.projection_bias)
        self.block = build_layer(layer, index)
        if config.output_norm:
            self.norm = norm(width, layer.rms_norm_eps)
        if config.lm_head_per_depth:
            self.lm_head = nn.Linear(width, config.vocab_size, bias=False)

    def forward(self, embeds: Tensor, hidden: Tensor, step: Pass) -> Tensor:
        """`[B, N, H]`, given embeddings and hidden states `[B, N, H]`."""
        inputs = self.enorm(embeds), self.hnorm(hidden)
        fused = self.eh_proj(torch.cat(inputs[::-1] if self.hidden_first else inputs, dim=-1))
        return self.block(fused, step.angles, step.attend)


class MTPHead(nn.Module):
    """The weights of a head: one prediction module per depth.

    Depth d at index t reads (embedding of token t + d + 1, hidden state of index t), sits at rotary
    position t, and predicts token t + d + 2.

    Such heads propose all ids of the target, so `target_ids` is `None`.

    Example:
        >>> head = MTPHead(MTPConfig(LayerConfig(8, 16, 2, 2, 4), vocab_size=9, num_layers=2))
        >>> sorted(name for name in head.state_dict() if "0" in name and "block" not in name)
        ['layers.0.eh_proj.weight', 'layers.0.enorm.weight', 'layers.0.hnorm.weight', \
'layers.0.norm.weight']
    """

    def __init__(self, config: MTPConfig, target_ids: Tensor | None = None):
        super().__init__()
        if target_ids is not None:
            raise ValueError("a multi-token prediction head proposes all ids; pass target_ids=None")
        self.config, width = config, config.hidden_size
        self.layers = nn.ModuleList(MTPDepth(config, d) for d in range(config.num_layers))
        if config.has_lm_head and not config.lm_head_per_depth:
            self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        if config.has_embed_tokens:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self.layers[0].eh_proj.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.layers[0].eh_proj.weight.device

    def fuse(self, features: Tensor) -> Tensor:
        """The hidden states that the target's features `[B, N, H]` are."""
        if features.shape[-1] != self.config.hidden_size:
            raise ValueError(
                f"the head reads one feature of width {self.config.hidden_size}, and the target's "
                f"are {features.shape[-1]} wide; it was made for another target"
            )
        return features.to(self.dtype)

    def forward(self, depth: int, embeds: Tensor, hidden: Tensor, step: Pass) -> Tensor:
        """One pass of one depth.

        Args:
            depth: 0..D - 1.
            embeds: `[B, N, H]`, of the tokens `depth + 1` after the positions of `hidden`.
            hidden: `[B, N, H]`, from `fuse`, or from `feedback` of the pass before.
            step: positions, angles and attention of the pass.

        Returns:
            `[B, N, H]`, for `logits` and `feedback`.
        """
        if self.config.zero_first_embedding:
            embeds = embeds.masked_fill((step.positions == 0)[..., None], 0)
        return self.layers[depth](embeds, hidden, step)

    def logits(self, depth: int, out: Tensor, lm_head: nn.Module | None = None) -> Tensor:
        """Logits `[B, N, V]` of a depth's outputs `[B, N, H]`; `lm_head` is the target's, for a
        head that has none of its own.
        """
        config, module = self.config, self.layers[depth]
        if config.output_norm:
            out = module.norm(out)
        if not config.has_lm_head:
            return apply_lm_head(lm_head, out)
        return (module if config.lm_head_per_depth else self).lm_head(out)

    def feedback(self, depth: int, out: Tensor) -> Tensor:
        """The hidden states `[B, N, H]` of the pass after this one."""
        return self.layers[depth].norm(out) if self.config.feedback_norm else out
