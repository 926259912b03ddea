"""What decoder layers of heads are made of.

The modules hold weights only. How queries find keys is a function that the caller passes
(`Attend`): over a window of a cache while drafting, causal over a whole text, or whatever a
training loss needs.

Legend: B rows, N tokens of a pass, R context states, H width of the head, D width of an attention
head, Hq query heads, Hkv key and value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers.activations import ACT2FN

from specdec.kernels.types import CAUSAL

if TYPE_CHECKING:
    from specdec.drafters.head.layer_config import LayerConfig

Attend = Callable[..., Tensor]
"""(index of the layer, queries `[B, Hq, N, D]`, keys and values `[B, Hkv, R + N, D]`) -> `[B, Hq,
N, D]`. Queries and keys have been rotated; the queries are those of the last N keys. An `HFLayer`
passes its `AttentionOptions` as a fifth argument.
"""


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
