"""Decoder layers of heads.

The modules hold weights only. How queries find keys is a function that the caller passes
(`Attend`): over a window of a cache while drafting, causal over a whole text, or whatever a
training loss needs.

Legend: B rows, N tokens of a pass, R context states, H width of the head, D width of an attention
head, Hq query heads, Hkv key and value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.arguments import check_integer, check_number
from specdec.drafters.head.config import check_fields, refuse
from specdec.drafters.head.rotary import INTERLEAVED, SECTIONS, axes_of, cosines_and_sines
from specdec.kernels import AttentionOptions
from specdec.kernels.types import CAUSAL
from specdec.slots.attention import attend
from specdec.slots.cache import KeyValueShape, Window

Attend = Callable[..., Tensor]
"""(index of the layer, queries `[B, Hq, N, D]`, keys and values `[B, Hkv, R + N, D]`) -> `[B, Hq,
N, D]`. Queries and keys have been rotated; the queries are those of the last N keys. An `HFLayer`
passes its `AttentionOptions` as a fifth argument.
"""


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

    def build(self, index: int) -> DecoderLayer:
        """A new plain layer, with the given index in a head's cache."""
        return DecoderLayer(self, index)

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


class RMSNorm(nn.RMSNorm):
    """Computes in the weight's data type, also where autocast hands in a narrower one."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` to the same."""
        return super().forward(x.to(self.weight.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`[B, heads, N, D]`, of which the first R channels are rotated with HF's pairing of channels i
    and i + R / 2.

    Args:
        x: `[B, heads, N, D]`.
        cos: `[B, 1, N, R]`.
        sin: `[B, 1, N, R]`, negated in its first half (see `rotary_table`).
    """
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], cos, sin), x[..., width:]], dim=-1)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; queries, keys and values are projected from H
    channels, or from `input_width`.
    """

    def __init__(self, config: LayerConfig, index: int, input_width: int | None = None):
        super().__init__()
        self.index = index
        self._heads = config.num_heads, config.head_dim
        self._kv_heads = config.num_kv_heads, config.head_dim
        inner, bias = input_width or config.hidden_size, config.attention_bias
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(inner, queries, bias=bias)
        self.k_proj = nn.Linear(inner, keys, bias=bias)
        self.v_proj = nn.Linear(inner, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_output_bias)
        self.has_qk_norm = config.has_qk_norm
        if self.has_qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.has_sinks else None
        self._options = config.attention_options(index)

    def forward(
        self, x: Tensor, angles: Tensor, attend: Attend, context: Tensor | None = None
    ) -> Tensor:
        """One pass.

        Args:
            x: `[B, N, input_width]`.
            angles: `[B, 1, R + N, 2 D]`, of the context's positions, then of the input's.
            attend: how queries find keys.
            context: `[B, R, input_width]`, states that bring keys and values and ask nothing;
                `None` for none.

        Returns:
            `[B, N, H]`.
        """
        states = x if context is None else torch.cat([context, x], dim=1)  # [B, R + N, ...]
        rows, count, num_keys = *x.shape[:2], states.shape[1]
        query = self.q_proj(x).view(rows, count, *self._heads).transpose(1, 2)  # [B, Hq, N, D]
        key = self.k_proj(states).view(rows, num_keys, *self._kv_heads).transpose(1, 2)
        value = self.v_proj(states).view(rows, num_keys, *self._kv_heads).transpose(1, 2)
        if self.has_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = angles.chunk(2, dim=-1)
        key = rotate(key, cos, sin)
        if context is not None:
            cos, sin = cos[:, :, num_keys - count :], sin[:, :, num_keys - count :]
        query = rotate(query, cos, sin)
        options = self._options
        if self.sinks is not None:
            options = options._replace(sinks=self.sinks)
        out = attend(self.index, query, key, value, *([] if options == CAUSAL else [options]))
        return self.o_proj(out.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`."""

    def __init__(self, config: LayerConfig):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        if config.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act must be one of HF's, got {config.hidden_act!r}")
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """`[B, N, H]` to `[B, N, H]`."""
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class BlockConvolution(nn.Module):
    """Two causal convolutions over the rows of a block: of the input of a half of a layer, and of
    its output. Their kernels are a fixed part and one that is made from the input of each row; rows
    before the block count as zeros.

    Reference: Z Lab, DFlash 2; speculators 0.9.0, `models/dflash2/model_definitions.py`.
    """

    def __init__(self, width: int, sizes: Convolution):
        super().__init__()
        self.group, self.taps = sizes.group, sizes.taps
        self.base_kernel = nn.Parameter(torch.zeros(2, sizes.taps, width))
        self.base_kernel.data[:, 0] = 1
        kernels = 2 * sizes.taps * (width // sizes.group)
        self.kernel_projection = nn.Linear(width, kernels, bias=False)

    def forward(self, x: Tensor, half: Callable[[Tensor], Tensor]) -> Tensor:
        """`[B, M, H]` to `[B, M, H]`, around a half of a layer."""
        own = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        own = own.repeat_interleave(self.group, dim=-1)  # [B, M, 2, taps, H]
        before, after = (own + self.base_kernel.to(own.dtype)).unbind(dim=2)
        return self._convolve(half(self._convolve(x, before)), after)

    def _convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, self.taps - 1, 0))
        count, out = x.shape[1], 0
        for tap in range(self.taps):  # tap t reads the row t earlier
            out = out + padded.narrow(1, self.taps - 1 - tap, count) * kernel[:, :, tap]
        return out


class DecoderLayer(nn.Module):
    """A plain pre-norm layer; the attention of the first layer of EAGLE-1 reads an input without
    norm. With convolutions its rows are those of one block.
    """

    def __init__(self, config: LayerConfig, index: int, *, has_input_norm: bool = True):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, index)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(width, eps) if has_input_norm else nn.Identity()
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.has_convolutions = config.convolution is not None
        if self.has_convolutions:
            self.attention_conv = BlockConvolution(width, config.convolution)
            self.mlp_conv = BlockConvolution(width, config.convolution)

    def forward(
        self, hidden: Tensor, angles: Tensor, attend: Attend, context: Tensor | None = None
    ) -> Tensor:
        """`[B, N, H]`, given the residual stream `[B, N, H]`; other Args as `Attention.forward`."""

        x = self.input_layernorm(hidden)
        if self.has_convolutions:
            x = self.attention_conv(x, lambda x: self.self_attn(x, angles, attend, context))
            hidden = hidden + x
            return hidden + self.mlp_conv(self.post_attention_layernorm(hidden), self.mlp)
        hidden = hidden + self.self_attn(x, angles, attend, context)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def look_up(embeddings: nn.Module, tokens: Tensor) -> Tensor:
    """Rows `[B, N, H]` of an embedding table, as it is stored: what a model's own module does to
    them (Gemma scales them) is not part of a head.

    A table that is spread over processes (tensor parallelism) is read where its rows are.
    """
    table = embeddings.weight
    if not isinstance(table, DTensor):
        return F.embedding(tokens, table)
    everywhere = [Replicate()] * table.device_mesh.ndim
    placed = DTensor.from_local(tokens, table.device_mesh, everywhere, run_check=False)
    return F.embedding(placed, table).full_tensor()


def apply_lm_head(lm_head: nn.Module, hidden: Tensor) -> Tensor:
    """Logits `[B, N, V]` of hidden states `[B, N, H]`, which take the data type of its weights."""
    dtype = lm_head.weight.dtype
    return lm_head(hidden.to(dtype) if dtype.is_floating_point else hidden)  # or it is quantised


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
