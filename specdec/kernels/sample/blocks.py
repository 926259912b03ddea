"""Draws from wide rows on a CPU, in two levels."""

import torch
from torch import Tensor


def draw_by_blocks(weights: Tensor, uniforms: Tensor, size: int) -> Tensor:
    """`draw` in two levels: first the block of `size` weights, then the index in the block.

    The cumulative weight of an index is the sum of the blocks before it plus the sum within its
    block. It equals that of `draw` but for the last bits of float64.
    """
    vocab = weights.shape[-1]
    whole = vocab // size * size
    sums = weights[..., :whole].unflatten(-1, (-1, size)).sum(dim=-1, dtype=torch.float64)
    if whole < vocab:
        rest = weights[..., whole:].sum(dim=-1, keepdim=True, dtype=torch.float64)
        sums = torch.cat([sums, rest], dim=-1)
    cumulative = sums.cumsum(dim=-1)  # [..., blocks]
    threshold = uniforms[..., None] * cumulative[..., -1:]
    block = torch.searchsorted(cumulative, threshold, right=True)  # [..., 1]
    block = block.clamp(max=sums.shape[-1] - 1)  # NaN, as in `draw`
    before = torch.nn.functional.pad(cumulative, (1, 0)).gather(-1, block)
    ids = block * size + torch.arange(size, device=weights.device)  # [..., size]
    inside = weights.gather(-1, ids.clamp(max=vocab - 1)).masked_fill(ids >= vocab, 0)
    cumulative = inside.cumsum(dim=-1, dtype=torch.float64)
    index = torch.searchsorted(cumulative, threshold - before, right=True)
    # The two levels round differently. A threshold just past the end of the block falls on the
    # block's last weight > 0.
    last = (cumulative < cumulative[..., -1:]).sum(dim=-1, keepdim=True)
    index = block * size + torch.minimum(index, last)
    return index[..., 0].clamp(max=vocab - 1)
