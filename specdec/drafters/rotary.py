"""Rotary positions of drafter heads.

Legend: B rows, N tokens of a pass, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.drafters.eagle_config import EagleConfig


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, HF's pairing of channel i with i + D / 2.

    Args:
        x: `[B, N, heads, D]`.
        cos: `[B, N, 1, D]`.
        sin: `[B, N, 1, D]`, negative in the first half.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def rotary_table(
    config: EagleConfig,
    num_positions: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Angles of positions 0, 1, ..., made by HF's own code for the rope that the config names.

    Two kinds of rope change their frequencies with the length of the text. Here position t is
    rotated as at the end of a text of t + 1 tokens, which is what HF does when it decodes token by
    token; so a row's angles depend on no other row, nor on how far the text will go.

    Args:
        config: of the head.
        num_positions: how many.
        dtype: of the table; angles are made in float32.
        device: where the table is needed.

    Returns:
        `[num_positions, 2 D]`: cosines, and sines with a minus in their first half (see `rotate`).

    Example:
        >>> from specdec.drafters.eagle_config import EagleConfig
        >>> config = EagleConfig("input", 8, 8, 1, 2, 2, 4, 9, 9, ("final",), 8)
        >>> rotary_table(config, 3, dtype=torch.float32)[0]
        tensor([1., 1., 1., 1., -0., -0., 0., 0.])

    Reference: Su et al., arXiv:2104.09864, eq. 34.
    """
    shape = LlamaConfig(
        hidden_size=config.num_heads * config.head_dim,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        rope_parameters=dict(config.rope),
        max_position_embeddings=config.max_position_embeddings,
    )
    rotary = LlamaRotaryEmbedding(shape)
    positions = torch.arange(num_positions)[None]
    original = config.rope.get("original_max_position_embeddings")
    parts = list(positions.split(original or config.max_position_embeddings, dim=1))
    if config.rope["rope_type"] == "dynamic":
        parts[1:] = [position for part in parts[1:] for position in part.split(1, dim=1)]
    like = torch.empty(0)
    cos, sin = (torch.cat(x, dim=1)[0] for x in zip(*(rotary(like, p) for p in parts), strict=True))
    half = config.head_dim // 2
    sin = torch.cat([-sin[:, :half], sin[:, half:]], dim=-1)
    return torch.cat([cos, sin], dim=-1).to(device, dtype)
