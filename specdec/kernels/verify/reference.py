"""The three rules that accept a prefix of a chain and draw one more token, in plain PyTorch.
`verdict` chooses between these and those of trees.

Legend: B rows, K draft tokens, V vocabulary.
"""

import torch
from torch import Tensor

from specdec.kernels.sample.reference import draw
from specdec.kernels.types import VerifyUniforms
from specdec.types import PAD_TOKEN, Draft


def token_rule(
    draft: Draft, target_probs: Tensor, uniforms: VerifyUniforms
) -> tuple[Tensor, Tensor]:
    """Speculative sampling of a chain, token by token.

    Draft token i is accepted iff `u_i * draft_prob_i < target_prob_i`: strict and without division,
    so a token of target probability 0 is never accepted. The extra token is drawn from `max(0,
    target - draft)` of the first rejected row. After the last valid draft token the draft
    probabilities are zeros, so the bonus token is the same draw. Where the residual is all zero
    (target and draft agree up to rounding) the extra token is drawn from the target row.

    Args:
        draft: K tokens per row; without probabilities, point masses on the tokens.
        target_probs: `[B, K + 1, V]`.
        uniforms: to accept and to resample.

    Returns:
        tokens `[B, K + 1]` padded with `PAD_TOKEN`, and num_accepted `[B]`.

    Reference: Leviathan et al., arXiv:2211.17192, Alg. 1; Chen et al., arXiv:2302.01318, Alg. 2.
    """
    width = draft.tokens.shape[1]
    target_of_draft = _at(target_probs[:, :width], draft.tokens)  # [B, K]
    is_accepted = uniforms.accept * draft.token_probs < target_of_draft
    if draft.num_valid is not None:
        is_accepted = is_accepted & draft.is_valid
    num_accepted = is_accepted.cumprod(dim=-1, dtype=torch.long).sum(dim=-1)  # [B]
    return _resampled(draft, target_probs, num_accepted, None, uniforms.resample)


def block_rule(
    draft: Draft, target_probs: Tensor, uniforms: VerifyUniforms, first: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Speculative sampling of a chain as a whole; no lossless rule accepts more of one path.

    With `P_0 = 1` and `P_i = min(1, P_{i-1} * target_i / draft_i)` of draft token i = 1..K, prefix
    i is accepted with probability `m_i / (m_i + 1 - P_i)`, where `m_i` is the sum of `max(0, P_i *
    target - draft)` over the row after the prefix, and the whole draft with `P_K`. The longest
    accepted prefix n is kept. The extra token is drawn from `max(0, P_n * target - draft)`. Another
    P_0, `first` `[B]`, leaves the part 1 - P_0 of the target to other drafts.

    Args and Returns: as `token_rule`; `draft.probs` is needed (for point masses both rules are the
    same).

    Reference: Sun et al., arXiv:2403.10444, Alg. 2 (their M_b, M_s, gamma are our target, draft, K;
    their h_i is written above as a ratio of sums).
    """
    width = draft.tokens.shape[1]
    ratio = _at(target_probs[:, :width], draft.tokens).double()
    ratio = ratio / draft.token_probs
    path = [torch.ones_like(ratio[:, 0]) if first is None else first]  # P_0
    for i in range(width):
        path.append((path[-1] * ratio[:, i]).clamp(max=1))
    path = torch.stack(path, dim=1)  # [B, K + 1]
    residual = path[:, :width, None].to(target_probs.dtype) * target_probs[:, :width] - draft.probs
    mass = residual.clamp(min=0).sum(dim=-1, dtype=torch.float64)[:, 1:]  # [B, K - 1]
    accept = uniforms.accept
    is_accepted = accept[:, :-1] * (mass + 1 - path[:, 1:width]) < mass  # prefixes 1..K - 1
    is_whole = accept < path[:, 1:]  # the rule where a prefix is all that was drafted
    is_accepted = torch.cat([is_accepted, is_whole[:, -1:]], dim=1)
    lengths = torch.arange(1, width + 1, device=draft.tokens.device)
    if draft.num_valid is not None:
        is_accepted = torch.where(lengths == draft.num_valid[:, None], is_whole, is_accepted)
        is_accepted = is_accepted & (lengths <= draft.num_valid[:, None])
    num_accepted = (is_accepted * lengths).amax(dim=-1)  # [B]
    factor = path.gather(1, num_accepted[:, None])
    return _resampled(draft, target_probs, num_accepted, factor, uniforms.resample)


def undrafted_rule(target_probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Where nothing was drafted, as in plain decoding: the token is drawn from the target's row.
    `token_rule` says the same with four times as many operations.

    Args:
        target_probs: `[B, 1, V]`.
        uniforms: `[B]` to draw.

    Returns:
        As `token_rule`.
    """
    tokens = draw(target_probs, uniforms[:, None])
    return tokens, torch.zeros_like(uniforms, dtype=torch.long)


def point_rule(draft: Draft, target_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Accepts a draft token iff it is the target's token; the extra token is the target's.

    This is `token_rule`, and `block_rule`, where every target distribution is one-hot, so that no
    uniform matters; and it is the rule of coupled sampling. Draft probabilities are not used.

    Args:
        draft: K tokens per row.
        target_tokens: `[B, K + 1]` the target's token at every index.

    Returns:
        As `token_rule`.
    """
    if not draft.tokens.shape[1]:
        return target_tokens, torch.zeros_like(target_tokens[:, 0])
    is_accepted = draft.tokens == target_tokens[:, :-1]
    if draft.num_valid is not None:
        is_accepted = is_accepted & draft.is_valid
    is_prefix = is_accepted.cumprod(dim=-1, dtype=torch.long)  # [B, K]
    tokens = target_tokens.clone()
    tokens[:, 1:].masked_fill_(is_prefix == 0, PAD_TOKEN)
    return tokens, is_prefix.sum(dim=-1)


def append_token(draft_tokens: Tensor, num_accepted: Tensor, extra: Tensor) -> Tensor:
    """`[B, K + 1]`: the first `num_accepted` `[B]` of the draft tokens `[B, K]`, then `extra`
    `[B]`, then `PAD_TOKEN`.

    Example:
        >>> append_token(torch.tensor([[5, 6, 7]]), torch.tensor([1]), torch.tensor([9]))
        tensor([[ 5,  9, -1, -1]])
    """
    index = torch.arange(draft_tokens.shape[1], device=draft_tokens.device)
    tokens = torch.where(index < num_accepted[:, None], draft_tokens, PAD_TOKEN)
    tokens = torch.nn.functional.pad(tokens, (0, 1), value=PAD_TOKEN)
    return tokens.scatter(1, num_accepted[:, None], extra[:, None])


def _resampled(
    draft: Draft,
    target_probs: Tensor,
    num_accepted: Tensor,
    factor: Tensor | None,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Appends a token drawn from `max(0, factor * target - draft)` of the row after the accepted
    prefix; `factor` is `[B, 1]`, or `None` for 1.
    """
    width = draft.tokens.shape[1]
    target_row = take_rows(target_probs, num_accepted[:, None])[:, 0]  # [B, V]
    residual = target_row
    if width:
        index = num_accepted.clamp(max=width - 1)
        is_short = num_accepted < (width if draft.num_valid is None else draft.num_valid)
        if draft.probs is None:
            rejected = _readable(draft.tokens).gather(1, index[:, None])
            residual = target_row.scatter(-1, rejected, 0.0)
        else:
            scaled = target_row if factor is None else target_row * factor
            residual = scaled.to(target_row.dtype) - take_rows(draft.probs, index[:, None])[:, 0]
            residual = residual.clamp_(min=0)
        is_left = is_short & (residual.sum(dim=-1) > 0)
        residual = torch.where(is_left[:, None], residual, target_row)
    return append_token(draft.tokens, num_accepted, draw(residual, uniforms)), num_accepted


def take_rows(table: Tensor, index: Tensor) -> Tensor:
    """`[B, W, V]`: of each batch row of a table `[B, N, V]`, the rows at its indices `[B, W]`."""
    return table.flatten(0, 1).index_select(0, flat_rows(table, index)).unflatten(0, index.shape)


def flat_rows(table: Tensor, index: Tensor) -> Tensor:
    """`[B W]`: rows of a table `[B, N, V]` in the list of all its rows."""
    rows, count, _ = table.shape
    first = torch.arange(0, rows * count, count, device=index.device)
    return (first[:, None] + index).flatten()


def _at(probs: Tensor, tokens: Tensor) -> Tensor:
    """`[B, K]` probabilities of the tokens."""
    return probs.gather(-1, _readable(tokens)[..., None])[..., 0]


def _readable(tokens: Tensor) -> Tensor:
    """Token ids, 0 in slots that hold none."""
    return tokens.clamp(min=0)
