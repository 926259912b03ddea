"""Definitions, in plain PyTorch, of what the kernels compute: the CPU path and the oracle of the tests."""

import torch
from torch import Tensor

from specdec.types import PAD_TOKEN


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draws an index in proportion to weights by inverting the cumulative sum.

    Args:
        weights: `[..., V]` >= 0, not all zero; they need not sum to 1.
        uniforms: `[...]` float64 in [0, 1) with at most 52 random bits.

    Returns:
        `[...]` int64: the first index whose cumulative weight exceeds `uniforms * total`. An index of weight 0 is
        never drawn, also at `uniforms == 0`.

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
) -> tuple[Tensor, Tensor, Tensor]:
    """Speculative sampling of a chain: accept a prefix, then draw one token from what is left of the target.

    Draft token i is accepted iff `u_i * draft_prob_i < target_prob_i`: strict and without division, so a token of
    target probability 0 is never accepted. The extra token is drawn from `max(0, target - draft)` of the first
    rejected row. Behind the last valid draft token the draft law is a row of zeros, so the bonus token is the same
    draw. Where nothing is left (target and draft agree up to rounding) the target row itself is drawn from.

    Args:
        draft_tokens: `[B, K]` int64.
        draft_probs: `[B, K, V]`, or `None` for point masses on the draft tokens.
        num_valid: `[B]` int64 tokens proposed per row, or `None` for K.
        target_probs: `[B, K + 1, V]`.
        accept_uniforms: `[B, K]` float64 in [0, 1).
        resample_uniforms: `[B]` float64 in [0, 1).

    Returns:
        tokens `[B, K + 1]` padded with `PAD_TOKEN`, num_accepted `[B]`, num_drafted `[B]`.

    Reference: Leviathan et al., arXiv:2211.17192, Alg. 1; Chen et al., arXiv:2302.01318, Alg. 2.
    """
    rows, width = draft_tokens.shape
    steps = torch.arange(width + 1, device=draft_tokens.device)
    num_drafted = draft_tokens.new_full((rows,), width) if num_valid is None else num_valid
    candidates = draft_tokens.clamp(min=0)[..., None]  # entries beyond num_valid may hold PAD_TOKEN

    target_of_draft = target_probs[:, :width].gather(-1, candidates)[..., 0]  # [B, K]
    draft_of_draft = 1.0 if draft_probs is None else draft_probs.gather(-1, candidates)[..., 0]
    is_accepted = accept_uniforms * draft_of_draft < target_of_draft
    if num_valid is not None:
        is_accepted = is_accepted & (steps[:width] < num_valid[:, None])
    num_accepted = is_accepted.long().cumprod(dim=-1).sum(dim=-1)  # [B]

    row = num_accepted[:, None, None]  # the row to draw the extra token from
    target_row = target_probs.gather(1, row.expand(-1, -1, target_probs.shape[-1]))[:, 0]  # [B, V]
    residual = target_row
    if width:
        row = row.clamp(max=width - 1)
        is_rejection = (num_accepted < num_drafted)[:, None]
        if draft_probs is None:
            rejected = candidates.gather(1, row)[:, 0]  # [B, 1]
            residual = target_row.scatter_add(-1, rejected, -is_rejection.to(target_row.dtype))
        else:
            draft_row = draft_probs.gather(1, row.expand(-1, -1, draft_probs.shape[-1]))[:, 0]
            residual = target_row - draft_row * is_rejection
        residual = residual.clamp(min=0)
        residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, target_row)
    extra = draw(residual, resample_uniforms)  # [B]

    padded = torch.nn.functional.pad(draft_tokens, (0, 1))
    tokens = torch.where(steps < num_accepted[:, None], padded, PAD_TOKEN)
    tokens = torch.where(steps == num_accepted[:, None], extra[:, None], tokens)
    return tokens, num_accepted, num_drafted
