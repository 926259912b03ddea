"""Rotary positions of heads, computed by HF's own code.

Legend: D width of an attention head, S positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def cosines_and_sines(
    rotary: nn.Module, num_positions: int, layer_type: str | None = None
) -> tuple[Tensor, Tensor]:
    """What an HF rotary module returns for positions 0, 1, ....

    Two kinds of rope ("dynamic", "longrope") change their frequencies with the length of the text.
    Position t is rotated here as the last one of a text of t + 1 tokens, which is what HF does when
    it decodes token by token. So the angles of a row depend neither on other rows nor on the length
    that the text will reach.

    Args:
        rotary: `LlamaRotaryEmbedding`, or the module of that role of another architecture, on the
            CPU: so the angles are the same wherever the head is.
        num_positions: S.
        layer_type: `"sliding_attention"`, for instance, where layers of an architecture differ in
            their rope.

    Returns:
        Cosines and sines, `[S, D]` float32 each.
    """
    rope, limit = rotary.config.rope_parameters, rotary.config.max_position_embeddings
    kind = {}
    if layer_type in rope:
        rope, kind = rope[layer_type], {"layer_type": layer_type}
    positions = torch.arange(num_positions, device="cpu")[None]
    parts = list(positions.split(rope.get("original_max_position_embeddings") or limit, dim=1))
    if rope["rope_type"] == "dynamic":
        parts[1:] = [position for part in parts[1:] for position in part.split(1, dim=1)]
    like = torch.empty(0, dtype=torch.float32, device="cpu")
    if hasattr(rotary, "mrope_section"):  # three positions per token; on text they are one
        parts = [part.expand(3, 1, -1) for part in parts]
    cos, sin = zip(*(rotary(like, part, **kind) for part in parts), strict=True)
    return torch.cat(cos, dim=1)[0], torch.cat(sin, dim=1)[0]
