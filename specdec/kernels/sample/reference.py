"""Sample: a token from logits, by inverting the cumulative distribution. See README.md.

Legend: B rows, N window indices, V vocabulary, or weights of a row.
"""

import torch
from torch import Tensor

from specdec.kernels.truncate.reference import filtered_probs
from specdec.kernels.types import FilterParams, suits_kernels

WIDE_SAMPLE = 16384
"""From this many weights on `draw` sums blocks of BLOCK first: a float64 cumulative sum of a wide
row costs more memory traffic than all else in a draw."""
BLOCK = 512


def sample(
    logits: Tensor, params: FilterParams, uniforms: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draws tokens, and returns the probabilities that they were drawn from.

    Args:
        logits: `[B, V]` or `[B, N, V]`.
        params: how they become probabilities.
        uniforms: `[B]` or `[B, N]` float64 in [0, 1).
        out: filled with the probabilities; of the shape of `logits`, float32 (float64 for float64
            logits), any strides whose last is 1. `None` allocates it.

    Returns:
        Tokens of the shape of `uniforms`, and `out`.

    Example:
        >>> logits, uniforms = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([0.3]).double()
        >>> sample(logits, FilterParams(), uniforms)
        (tensor([1]), tensor([[0.0900, 0.2447, 0.6652]]))
    """
    if logits.is_cuda and suits_kernels(logits):
        from specdec.kernels.sample import triton

        if out is None:
            out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        return triton.sample(logits, params, uniforms, out), out
    probs = filtered_probs(logits, params, out)
    return draw(probs, uniforms), probs


def sample_tokens(logits: Tensor, params: FilterParams, uniforms: Tensor) -> Tensor:
    """The tokens of `sample`; on a GPU no probabilities are written."""
    if logits.is_cuda and suits_kernels(logits):
        from specdec.kernels.sample import triton

        return triton.sample(logits, params, uniforms, None)
    return draw(filtered_probs(logits, params), uniforms)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draws an index in proportion to weights by inverting the cumulative sum, in float64.

    Args:
        weights: `[..., V]` >= 0, not all zero; they need not sum to 1.
        uniforms: `[...]` float64 in [0, 1) with at most 52 random bits.

    Returns:
        `[...]` int64: the first index whose cumulative weight exceeds `uniforms * total`. An index
        of weight 0 is never drawn, also at `uniforms == 0`.

    Example:
        >>> draw(torch.tensor([0.0, 1.0, 3.0]), torch.tensor(0.3, dtype=torch.float64))
        tensor(2)
    """
    if weights.shape[-1] >= WIDE_SAMPLE:
        from specdec.kernels.sample.blocks import draw_by_blocks

        return draw_by_blocks(weights, uniforms, BLOCK)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    threshold = uniforms[..., None] * cumulative[..., -1:]
    index = torch.searchsorted(cumulative, threshold, right=True)[..., 0]
    return index.clamp(max=weights.shape[-1] - 1)  # only weights that are NaN run past the end
