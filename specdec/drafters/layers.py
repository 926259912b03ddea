"""Decoder layers of drafter heads, and their attention over a `SlotCache`.

Legend: B rows, N tokens of a pass, H width, D width of a head. The modules hold weights only; how
queries find keys is a function that the caller passes (`Attend`): a window of a cache while
drafting, a causal mask over a whole text, or what a training loss asks for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from specdec.drafters.eagle_config import EagleConfig
from specdec.drafters.rotary import rotate
from specdec.target.attention import window_mask
from specdec.target.cache import SlotCache

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries `[B, Hq, N, D]`, keys and values `[B, Hkv, N, D]`) -> `[B, N, Hq, D]`. Queries
and keys have been rotated.
"""


class RMSNorm(nn.RMSNorm):
    """Computes in the weight's data type, also where autocast hands in a narrower one."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` to the same."""
        return super().forward(x.to(self.weight.dtype))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    Args:
        config: of the head.
        layer: index of the layer.
        input_width: of what queries, keys and values are projected from: H, or 2 H.
    """

    def __init__(self, config: EagleConfig, layer: int, input_width: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        width, bias = config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(input_width, config.num_heads * width, bias=bias)
        self.k_proj = nn.Linear(input_width, config.num_kv_heads * width, bias=bias)
        self.v_proj = nn.Linear(input_width, config.num_kv_heads * width, bias=bias)
        self.o_proj = nn.Linear(
            config.num_heads * width, config.hidden_size, bias=config.attention_output_bias
        )
        self.has_qk_norm = config.has_qk_norm
        if self.has_qk_norm:
            self.q_norm = RMSNorm(width, config.rms_norm_eps)
            self.k_norm = RMSNorm(width, config.rms_norm_eps)

    def forward(self, x: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        """`[B, N, H]`, given input `[B, N, H or 2 H]` and angles `[B, N, 1, 2 D]`."""
        rows, count, _ = x.shape
        shape = rows, count, -1, self.head_dim
        query, key = self.q_proj(x).view(shape), self.k_proj(x).view(shape)
        if self.has_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = angles.chunk(2, dim=-1)
        states = rotate(query, cos, sin), rotate(key, cos, sin), self.v_proj(x).view(shape)
        out = attend(self.layer, *(s.transpose(1, 2) for s in states))
        return self.o_proj(out.flatten(2))


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """`[B, N, H]` to `[B, N, H]`."""
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A plain pre-norm layer.

    Args:
        config: of the head.
        layer: index of the layer.
        has_input_norm: whether the attention reads a normalised input. (EAGLE-1 has no norm in its
            first layer.)
    """

    def __init__(self, config: EagleConfig, layer: int, *, has_input_norm: bool = True):
        super().__init__()
        width = config.hidden_size
        self.self_attn = Attention(config, layer, width)
        self.mlp = GatedMLP(config)
        self.input_layernorm = nn.Identity()
        if has_input_norm:
            self.input_layernorm = RMSNorm(width, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(width, config.rms_norm_eps)

    def forward(self, hidden: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        """`[B, N, H]`, given the residual stream `[B, N, H]` and angles `[B, N, 1, 2 D]`."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), angles, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class FusingLayer(nn.Module):
    """EAGLE-3's first layer: queries, keys and values read the embedding beside the hidden state.

    Args:
        config: of the head.
    """

    def __init__(self, config: EagleConfig):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, 0, 2 * width)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.norm_before_residual = config.norm_before_residual

    def forward(self, embeds: Tensor, hidden: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        """`[B, N, H]`, given embeddings and hidden states `[B, N, H]`."""
        normed = self.hidden_norm(hidden)
        fused = torch.cat([self.input_layernorm(embeds), normed], dim=-1)  # [B, N, 2 H]
        residual = normed if self.norm_before_residual else hidden
        hidden = residual + self.self_attn(fused, angles, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def attend_causally(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention without a cache: each token of a pass sees itself and those before it (`Attend`).

    Example:
        >>> q, kv = torch.randn(1, 4, 3, 2), torch.randn(1, 2, 3, 2)
        >>> attend_causally(0, q, kv, kv)[:, 0, :2].equal(kv[:, [0, 0], 0])
        True
    """
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
    ).transpose(1, 2)


class SlotPasses:
    """Consecutive passes over the windows of a `SlotCache`, planned together.

    Args:
        cache: the rows' storage.
        slots: `[B, M]` int64, slots (= positions) of all tokens, pass after pass; the cache's
            `trash` slot for tokens to forget.
        num_attended: host upper bound of the largest real slot, plus 1.
        table: `[S + 1, 2 D]`, see `rotary_table`.
    """

    def __init__(self, cache: SlotCache, slots: Tensor, *, num_attended: int, table: Tensor):
        self._cache, self._slots, self._num_attended = cache, slots, num_attended
        self._angles = F.embedding(slots, table)[:, :, None]  # [B, M, 1, 2 D]

    def open(self, first: int, count: int) -> tuple[Tensor, Attend]:
        """The next pass.

        Args:
            first: index of its first token.
            count: how many tokens it has.

        Returns:
            Angles `[B, count, 1, 2 D]`, and the attention that writes the pass's keys and values
            into its slots and reads all that each of its tokens may see.
        """
        cache, slots = self._cache, self._slots.narrow(1, first, count)
        window = cache.open_window(slots, num_attended=self._num_attended)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = cache.update(key, value, layer)
            mask, is_grouped = window_mask(window, None, query), query.shape[1] != key.shape[1]
            return F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, enable_gqa=is_grouped
            ).transpose(1, 2)

        return self._angles.narrow(1, first, count), attend
