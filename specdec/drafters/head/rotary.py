"""Rotary positions of heads, computed by HF's own code.

Legend: D width of an attention head, S positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SECTIONS, INTERLEAVED = "mrope_section", "mrope_interleaved"
"""Keys of a rope whose frequencies turn by three positions of a token: time, height and width."""


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


def axes_of(rope: Mapping[str, Any], width: int) -> Tensor | None:
    """By which of its three positions (time, height, width) each frequency of a rope turns a token;
    of text all three are one.

    Args:
        rope: HF's `rope_parameters`.
        width: R, channels that are turned.

    Returns:
        `[R / 2]` int64; `None` for a rope of one position.

    Raises:
        ValueError: sections that are not three numbers, or not as many frequencies in all.

    Example:
        >>> axes_of({"mrope_section": [2, 1, 1]}, 8)
        tensor([0, 0, 1, 2])
        >>> axes_of({"mrope_section": [2, 1, 1], "mrope_interleaved": True}, 8)
        tensor([0, 1, 2, 0])

    Reference: Wang et al., arXiv:2409.12191 (M-RoPE); interleaved as in HF's Qwen3-VL.
    """
    sections = rope.get(SECTIONS)
    if sections is None:
        return None
    is_known = isinstance(sections, list | tuple) and len(sections) == 3
    if not is_known or not all(type(n) is int and n >= 0 for n in sections):
        raise ValueError(f"{SECTIONS} must be three numbers of frequencies, got {sections!r}")
    if rope.get(INTERLEAVED):
        order = torch.arange(width // 2, device="cpu")
        axis = order % 3
        limit = 3 * torch.tensor(sections, device="cpu")[axis]
        return axis.where((axis > 0) & (order < limit), 0)
    if sum(sections) != width // 2:
        raise ValueError(
            f"{SECTIONS} {list(sections)} must add up to {width // 2} frequencies, half of what is "
            "turned of a head"
        )
    return torch.arange(3, device="cpu").repeat_interleave(torch.tensor(sections, device="cpu"))


def angles_at(table: Tensor, positions: Tensor, axes: Tensor | None) -> Tensor:
    """Rows of a rotary table at the positions of tokens.

    Args:
        table: `[S, 2 R]`, see `LayerConfig.rotary_table`.
        positions: int64 `[B, N]`, or `[3, B, N]` of three axes; those beyond the table are taken
            for its last one.
        axes: `[R / 2]`, of `axes_of`.

    Returns:
        `[B, N, 2 R]`.
    """
    rows = F.embedding(positions.clamp(0, len(table) - 1), table)
    if positions.dim() == 2:
        return rows
    # Cosines and sines of each frequency stand four times, half a head apart.
    index = axes.repeat(4).expand(rows.shape[1:])
    return rows.gather(0, index[None])[0]
