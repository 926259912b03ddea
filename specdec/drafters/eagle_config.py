"""`EagleConfig`: how an EAGLE head is wired, with every convention of its producer resolved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from specdec.features import FeatureLayer


@dataclass(frozen=True)
class EagleConfig:
    """Sizes and flags of a head. Nothing in it depends on who trained it: loaders translate.

    Args:
        fusion: `"input"`: embedding and feature go through `fc` together, before the first layer
            (EAGLE-1, EAGLE-2). `"attention"`: `fc` joins the features alone, and the first layer's
            queries, keys and values read embedding and feature side by side (EAGLE-3).
        hidden_size: H of the head.
        intermediate_size: width of the MLP.
        num_layers: decoder layers; layers behind the first are plain ones.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        vocab_size: V of the target.
        draft_vocab_size: ids that the head can propose; V for all.
        feature_layers: target features, as boundaries (or `"final"`), in the order in which they
            are joined.
        target_hidden_size: width of each feature.
        has_fc: features pass through `fc`; without it the one feature is the hidden state itself.
        fc_bias: `fc` has a bias.
        attention_bias: queries, keys and values have biases.
        has_qk_norm: queries and keys are normalised per head.
        norm_before_fc: one norm over all features together, before `fc`.
        fc_norm: one norm per feature, before `fc`.
        norm_before_residual: the first layer's residual stream is the normalised hidden state.
        output_norm: a norm stands before the vocabulary head.
        feedback_norm: what feeds the next draft step is the normalised output, not the raw one.
        logit_scale: multiplies the logits.
        rms_norm_eps: of all norms.
        hidden_act: HF's name of the MLP's activation.
        rope: HF's `rope_parameters`, with `rope_type` and `rope_theta`.
        max_position_embeddings: the length that rope scalings refer to; it caps nothing.
    """

    fusion: Literal["input", "attention"]
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    feature_layers: tuple[FeatureLayer, ...]
    target_hidden_size: int
    has_fc: bool = True
    fc_bias: bool = False
    attention_bias: bool = False
    has_qk_norm: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    output_norm: bool = True
    feedback_norm: bool = False
    logit_scale: float = 1.0
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: dict = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048
