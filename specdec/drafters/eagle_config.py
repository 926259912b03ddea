"""`EagleConfig`: how an EAGLE head is wired, with every convention of its producer resolved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from specdec.target.features import FeatureLayer


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
        attention_output_bias: the attention's output projection has one too (`o_proj.bias`; HF's
            Llama and Qwen3 layers do so with `attention_bias`, Qwen2's do not).
        has_qk_norm: queries and keys are normalised per head.
        norm_before_fc: one norm over all features together, before `fc`.
        fc_norm: one norm per feature, before `fc`.
        norm_before_residual: the first layer's residual stream is the normalised hidden state.
        output_norm: a norm stands before the vocabulary head.
        feedback_norm: what feeds the next draft step is the normalised output, not the raw one.
        has_embed_tokens: the head brings embeddings of its own; else it reads the target's table.
        has_lm_head: the head brings a vocabulary head of its own; else it uses the target's.
        logit_scale: multiplies the logits.
        rms_norm_eps: of all norms.
        hidden_act: HF's name of the MLP's activation.
        rope: HF's `rope_parameters`, with `rope_type` and `rope_theta`.
        max_position_embeddings: the length that rope scalings refer to; it caps nothing.

    Raises:
        ValueError: flags or sizes that contradict each other.
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
    attention_output_bias: bool = False
    has_qk_norm: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    output_norm: bool = True
    feedback_norm: bool = False
    has_embed_tokens: bool = False
    has_lm_head: bool = True
    logit_scale: float = 1.0
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: dict = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048

    def __post_init__(self):
        for is_wrong, message in self._contradictions():
            if is_wrong:
                raise ValueError(message)

    @property
    def feature_width(self) -> int:
        """F: width of all features together."""
        return len(self.feature_layers) * self.target_hidden_size

    def _contradictions(self):
        """Pairs (is it so, what to say of it)."""
        width, hidden = self.feature_width, self.hidden_size
        has_early_norm = self.norm_before_fc or self.fc_norm
        is_input = self.fusion == "input"
        yield (
            self.fusion not in ("input", "attention"),
            f"fusion must be 'input' or 'attention', got {self.fusion!r}",
        )
        yield (
            is_input and (has_early_norm or self.norm_before_residual or not self.has_fc),
            "fusion='input' joins embedding and feature in fc: has_fc must be True, and "
            "norm_before_fc, fc_norm and norm_before_residual have no meaning",
        )
        yield (
            (is_input or not self.has_fc) and width != hidden,
            f"features are {width} wide in all and the head is {hidden} wide; only an fc in front "
            "of fusion='attention' can join or resize features",
        )
        yield (
            not self.has_fc and (has_early_norm or self.fc_bias),
            "norm_before_fc, fc_norm and fc_bias need has_fc=True",
        )
        yield (
            self.norm_before_fc and self.fc_norm,
            "norm_before_fc is one norm over all features, fc_norm one for each; choose one",
        )
        yield (
            not 0 < self.draft_vocab_size <= self.vocab_size,
            f"draft_vocab_size must be in 1..vocab_size = {self.vocab_size}, got "
            f"{self.draft_vocab_size}",
        )
        yield (
            self.draft_vocab_size < self.vocab_size and not self.has_lm_head,
            f"a head of {self.draft_vocab_size} ids cannot use the target's vocabulary head of "
            f"{self.vocab_size}; has_lm_head must be True",
        )
        yield (
            self.num_layers < 1 or self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads,
            f"expected num_layers >= 1 and num_heads a multiple of num_kv_heads, got "
            f"{self.num_layers} layers, {self.num_heads} heads and {self.num_kv_heads}",
        )
        yield (
            self.head_dim % 2 or self.rope.get("partial_rotary_factor", 1) != 1,
            f"rotary positions turn whole heads of even width, got head_dim {self.head_dim} and "
            f"rope {self.rope}",
        )
