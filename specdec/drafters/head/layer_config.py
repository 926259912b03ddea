"""LayerConfig: sizes and flags of the decoder layers of a head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.arguments import check_integer, check_number
from specdec.drafters.head.config import check_fields, refuse
from specdec.drafters.head.rotary import INTERLEAVED, SECTIONS, axes_of, cosines_and_sines
from specdec.kernels import AttentionOptions
from specdec.slots.layout import KeyValueShape


class Convolution(NamedTuple):
    """Sizes of the convolutions around the two halves of a layer; see `BlockConvolution`.

    Args:
        taps: how many rows each one reads, its own included.
        group: channels that share what the kernel gets from a row.
    """

    taps: int = 2
    group: int = 16


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
        rope: HF's `rope_parameters`, with `rope_type` and `rope_theta`; with `mrope_section` and
            `mrope_interleaved` where tokens have positions of three axes, see `axes_of`.
        max_position_embeddings: the length that rope scalings refer to; it limits nothing.
        windows: the sliding window of each layer, in positions: a query at position q sees those
            after q - window. `None` for a layer that sees all; `()` for all of them.
        is_window_causal: in a layer with a window, rows of a block see those before them only.
        has_sinks: each attention head has a score (`self_attn.sinks`) that takes weight and has no
            value.
        convolution: of DFlash 2, around both halves of each layer; `None` for none.

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
    windows: tuple[int | None, ...] = ()
    is_window_causal: bool = True
    has_sinks: bool = False
    convolution: Convolution | None = None

    def __post_init__(self):
        check_fields(self)
        for window in self.windows:
            check_integer("a window of LayerConfig.windows", 1 if window is None else window, 1)
        for name, size in (self.convolution or Convolution())._asdict().items():
            check_integer(f"LayerConfig.convolution.{name}", size, 1)
        heads, kv_heads, size = self.num_heads, self.num_kv_heads, self.head_dim
        for name in ("hidden_size", "intermediate_size", "num_heads", "head_dim"):
            check_integer(f"LayerConfig.{name}", getattr(self, name), 1)
        check_number("LayerConfig.rms_norm_eps", self.rms_norm_eps, 0)
        is_uneven = kv_heads < 1 or heads % kv_heads
        counts = f"num_heads must be a multiple of num_kv_heads, got {heads} heads and {kv_heads}"
        factor = self.rope.get("partial_rotary_factor", 1)
        is_odd = not 0 < factor <= 1 or int(size * factor) % 2
        turns = "rotary positions turn an even part of a head, got head_dim"
        groups = 1 if self.convolution is None else self.convolution.group
        whole = f"hidden_size {self.hidden_size} must be a multiple of a convolution's group"
        refuse(
            [
                (is_uneven, counts),
                (is_odd, f"{turns} {size} and rope {self.rope}"),
                (self.hidden_size % groups, f"{whole}, got {groups}"),
            ]
        )

    def attention_options(self, index: int) -> AttentionOptions:
        """How a layer attends, its sinks aside."""
        window = self.windows[index] if self.windows else None
        return AttentionOptions(
            sliding_window=window, is_causal=window is not None and self.is_window_causal
        )

    def key_value_shape(self, *, dtype: torch.dtype, device: torch.device) -> KeyValueShape:
        """What a layer stores of a token."""
        return KeyValueShape(self.num_kv_heads, self.head_dim, self.head_dim, dtype, device)

    @property
    def rotary_width(self) -> int:
        """R: channels of a head that are turned."""
        return int(self.head_dim * self.rope.get("partial_rotary_factor", 1))

    @property
    def axes(self) -> Tensor | None:
        """See `axes_of`."""
        return axes_of(self.rope, self.rotary_width)

    def rotary_table(
        self, num_positions: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Angles of positions 0, 1, ..., for the rope that the layer names.

        Returns:
            `[S, 2 D]`, computed in float32: cosines, then sines, negated in their first half (see
            `rotate`); `[S, 2 R]` of a rope that turns R channels of a head
            (`partial_rotary_factor`).

        Reference: Su et al., arXiv:2104.09864, eq. 34.
        """
        rope = {k: v for k, v in self.rope.items() if k not in (SECTIONS, INTERLEAVED)}
        rope.pop("partial_rotary_factor", None)
        width = self.rotary_width
        config = LlamaConfig(
            hidden_size=self.num_heads * width,
            num_attention_heads=self.num_heads,
            head_dim=width,
            rope_parameters=rope,
            max_position_embeddings=self.max_position_embeddings,
        )
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(config)
        cos, sin = cosines_and_sines(rotary, num_positions)
        half = width // 2
        return torch.cat([cos, -sin[:, :half], sin[:, half:]], dim=-1).to(device, dtype)
