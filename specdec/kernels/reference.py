"""Definitions, in plain PyTorch, of what the kernels compute: the CPU path and the oracle of the
tests.
"""

import torch
from torch import Tensor

from specdec.types import PAD_TOKEN


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draws an index in proportion to weights by inverting the cumulative sum.

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
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    threshold = uniforms[..., None] * cumulative[..., -1:]
    index = torch.searchsorted(cumulative, threshold, right=True)[..., 0]
    return index.clamp(max=weights.shape[-1] - 1)  # only weights that are NaN can run past the end


def verify_chain(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    num_valid: Tensor | None,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    resample_uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Speculative sampling of a chain: accept a prefix, then draw one token from what is left of
    the target.

    Draft token i is accepted iff `u_i * draft_prob_i < target_prob_i`: strict and without division,
    so a token of target probability 0 is never accepted. The extra token is drawn from `max(0,
    target - draft)` of the first rejected row. Behind the last valid draft token the draft law is a
    row of zeros, so the bonus token is the same draw. Where nothing is left (target and draft agree
    up to rounding) the target row itself is drawn from.

    Args:
        draft_tokens: `[B, K]` int64.
        draft_probs: `[B, K, V]`, or `None` for point masses on the draft tokens.
        num_valid: `[B]` int64 tokens proposed per row, or `None` for K.
        target_probs: `[B, K + 1, V]`.
        accept_uniforms: `[B, K]` float64 in [0, 1).
        resample_uniforms: `[B]` float64 in [0, 1).

    Returns:
        tokens `[B, K + 1]` padded with `PAD_TOKEN`, and num_accepted `[B]`.

    Reference: Leviathan et al., arXiv:2211.17192, Alg. 1; Chen et al., arXiv:2302.01318, Alg. 2.
    """
    width = draft_tokens.shape[1]
    candidates = draft_tokens if num_valid is None else draft_tokens.clamp(min=0)
    candidates = candidates[..., None]  # [B, K, 1]

    target_of_draft = target_probs[:, :width].gather(-1, candidates)[..., 0]  # [B, K]
    draft_of_draft = 1.0 if draft_probs is None else draft_probs.gather(-1, candidates)[..., 0]
    is_accepted = accept_uniforms * draft_of_draft < target_of_draft
    if num_valid is not None:
        steps = torch.arange(width, device=draft_tokens.device)
        is_accepted = is_accepted & (steps < num_valid[:, None])
    is_prefix = is_accepted.cumprod(dim=-1, dtype=torch.long)  # [B, K]
    num_accepted = is_prefix.sum(dim=-1)  # [B]

    last = num_accepted[:, None, None]  # the row that the extra token is drawn from
    target_row = target_probs.gather(1, last.expand(-1, -1, target_probs.shape[-1]))[:, 0]
    residual = target_row  # [B, V]
    if width:
        last = last.clamp(max=width - 1)
        is_rejection = (num_accepted < (width if num_valid is None else num_valid))[:, None]
        if draft_probs is None:
            rejected = candidates.gather(1, last)[:, 0]  # [B, 1]
            residual = residual.scatter_add(-1, rejected, -is_rejection.to(residual.dtype))
        else:
            draft_row = draft_probs.gather(1, last.expand(-1, -1, draft_probs.shape[-1]))[:, 0]
            residual = residual - draft_row * is_rejection
        residual = residual.clamp(min=0)
        residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, target_row)
    extra = draw(residual, resample_uniforms)  # [B]

    tokens = torch.where(is_prefix.bool(), draft_tokens, PAD_TOKEN)
    tokens = torch.nn.functional.pad(tokens, (0, 1), value=PAD_TOKEN)
    return tokens.scatter(1, num_accepted[:, None], extra[:, None]), num_accepted


def verify_points(
    draft_tokens: Tensor, num_valid: Tensor | None, target_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """`verify_chain` where every target law is a point mass, so that no draw can change anything.

    A draft token is accepted iff it is the target's token, whatever law it came from; the residual
    of the first rejected row is the target's token again.

    Args:
        draft_tokens: `[B, K]` int64.
        num_valid: `[B]` int64 tokens proposed per row, or `None` for K.
        target_tokens: `[B, K + 1]` the only token of each target law.

    Returns:
        As `verify_chain`, and equal to it.
    """
    width = draft_tokens.shape[1]
    is_accepted = draft_tokens == target_tokens[:, :width]
    if num_valid is not None:
        steps = torch.arange(width, device=draft_tokens.device)
        is_accepted = is_accepted & (steps < num_valid[:, None])
    is_prefix = is_accepted.cumprod(dim=-1, dtype=torch.long)  # [B, K]
    tokens = target_tokens.clone()
    tokens[:, 1:].masked_fill_(is_prefix == 0, PAD_TOKEN)
    return tokens, is_prefix.sum(dim=-1)
