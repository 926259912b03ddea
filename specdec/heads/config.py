"""`LayerConfig`: what a decoder layer of a head is made of; `HeadConfig`: what heads declare."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.arguments import check_integer, check_number, shown
from specdec.heads.layers import DecoderLayer
from specdec.heads.rotary import rotary_table
from specdec.target.cache import KeyValueShape
from specdec.target.features import FeatureLayer


@dataclass(frozen=True)
class LayerConfig:
    """Sizes and flags of a decoder layer, independent of the head's family.

    Args:
        hidden_size: H, width of the residual stream.
        intermediate_size: width of the MLP.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: D, width of a head.
        attention_bias: queries, keys and values have biases.
        attention_output_bias: the attention's output projection has a bias (`o_proj.bias`; HF's
            Llama and Qwen3 layers add it with `attention_bias`, Qwen2's do not).
        has_qk_norm: queries and keys are normalised per head.
        rms_norm_eps: of all norms of the head.
        hidden_act: HF's name of the MLP's activation.
        rope: HF's `rope_parameters`, with `rope_type` and `rope_theta`.
        max_position_embeddings: the length that rope scalings refer to; it limits nothing.

    Example:
        >>> LayerConfig(8, 16, 2, 1, 4).rope["rope_theta"]
        10000.0
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_bias: bool = False
    attention_output_bias: bool = False
    has_qk_norm: bool = False
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: dict = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048

    def __post_init__(self):
        check_fields(self)
        heads, kv_heads, size = self.num_heads, self.num_kv_heads, self.head_dim
        for name in ("hidden_size", "intermediate_size", "num_heads", "head_dim"):
            check_integer(f"LayerConfig.{name}", getattr(self, name), 1)
        check_number("LayerConfig.rms_norm_eps", self.rms_norm_eps, 0)
        is_uneven = kv_heads < 1 or heads % kv_heads
        counts = f"num_heads must be a multiple of num_kv_heads, got {heads} heads and {kv_heads}"
        is_partial = size % 2 or self.rope.get("partial_rotary_factor", 1) != 1
        turns = "rotary positions turn whole heads of even width, got head_dim"
        refuse([(is_uneven, counts), (is_partial, f"{turns} {size} and rope {self.rope}")])

    def build(self, index: int) -> DecoderLayer:
        """A new plain layer, with the given index in a head's cache."""
        return DecoderLayer(self, index)

    def key_value_shape(self, *, dtype: torch.dtype, device: torch.device) -> KeyValueShape:
        """What a layer stores of a token."""
        return KeyValueShape(self.num_kv_heads, self.head_dim, self.head_dim, dtype, device)

    def rotary_table(
        self, num_positions: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Tensor:
        """`[S, 2 D]`, see `heads.rotary.rotary_table`."""
        return rotary_table(self, num_positions, dtype=dtype, device=device)


class HeadConfig(Protocol):
    """What the configuration of a head has, in every family; a frozen dataclass.

    Attributes:
        layer: a `LayerConfig` or `HFLayerConfig`, of its decoder layers.
        num_layers: decoder layers.
        hidden_size: H of the head.
        vocab_size: V of the target.
        draft_vocab_size: Vd, how many ids the head can propose; V for all.
        feature_layers: target features that it reads, as boundaries or `"final"`.
        target_hidden_size: width of each feature.
        has_embed_tokens: the head has an embedding table of its own; else it reads the target's.
        has_lm_head: the head has a vocabulary head of its own; else it uses the target's.
    """

    layer: Any
    num_layers: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    feature_layers: tuple[FeatureLayer, ...]
    target_hidden_size: int
    has_embed_tokens: bool
    has_lm_head: bool


def check_fields(config: Any) -> None:
    """Raises `TypeError` for a flag that is no bool, since "false" would count as true, and for a
    size that is no integer.
    """
    for part in fields(config):
        kind, value = {"bool": bool, "int": int}.get(part.type), getattr(config, part.name)
        if kind is not None and type(value) is not kind:
            expected = "True or False" if kind is bool else "an integer"
            name = f"{type(config).__name__}.{part.name}"
            raise TypeError(f"{name} must be {expected}, got {shown(value)}")


def refuse(contradictions: Iterable[tuple[bool, str]]) -> None:
    """Raises `ValueError` with the message of the first pair (condition, message) that holds."""
    for is_wrong, message in contradictions:
        if is_wrong:
            raise ValueError(message)
