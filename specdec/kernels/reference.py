"""Definitions, in plain PyTorch, of what the kernels compute: the CPU path and the oracle of the
tests.

Legend: B rows, K draft tokens, V vocabulary.
"""

import torch
from torch import Tensor

from specdec.kernels.inverse import draw
from specdec.kernels.philox import philox, to_uniforms
from specdec.types import PAD_TOKEN, Fault

LAW_TOLERANCE = 1e-3
"""How far the sum of a draft law may be from 1: rounding of a wide float32 law, and no more."""


def race(weights: Tensor, key: Tensor, position: Tensor, stream: int) -> Tensor:
    """Draws an index in proportion to weights by an exponential race: the least `E_v / weight_v`
    wins. It is the Gumbel-max trick, written without logarithms of weights.

    Noise depends on (seed, position, stream, token) only, so two races at one position over similar
    weights mostly have the same winner.

    Args:
        weights: `[B, N, V]` >= 0, not all zero.
        key: `[B, 2]` int64, the two words of each row's seed.
        position: `[B, N]` int64, positions in the text.
        stream: disjoint noise for disjoint purposes.

    Returns:
        `[B, N]` int64. An index of weight 0 never wins.

    Reference: Daliri et al., arXiv:2408.07978 (Gumbel sampling).
    """
    return first_arrival(weights, exponentials(key, position, stream, weights.shape[-1]))


def exponentials(key: Tensor, position: Tensor, stream: int, vocab: int) -> Tensor:
    """Independent Exp(1) draws `[B, N, V]` float64; Args as `race`."""
    rows, count = position.shape
    pairs = (vocab + 1) // 2  # one counter's four words serve two tokens
    counter = torch.zeros(rows, count, pairs, 4, dtype=torch.long, device=position.device)
    counter[..., 0] = position[..., None]
    counter[..., 1] = torch.arange(pairs, device=position.device)
    counter[..., 2] = stream
    words = philox(counter, key[:, None, None])
    uniforms = to_uniforms(words[..., 0::2], words[..., 1::2]).flatten(-2)[..., :vocab]
    return -torch.log1p(-uniforms)  # E = -log(1 - u), u in [0, 1)


def first_arrival(weights: Tensor, draws: Tensor) -> Tensor:
    """`[...]` int64: the index of the least `draws / weights`, both `[..., V]`, among the
    positive weights.
    """
    times = draws / weights
    return times.masked_fill(weights <= 0, torch.inf).argmin(dim=-1)


def verify_chain(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    num_valid: Tensor | None,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    resample_uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Speculative sampling of a chain, token by token: accept a prefix, then draw one token from
    what is left of the target.

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
    target_of_draft = _at(target_probs[:, :width], draft_tokens)  # [B, K]
    draft_of_draft = 1.0 if draft_probs is None else _at(draft_probs, draft_tokens)
    is_accepted = accept_uniforms * draft_of_draft < target_of_draft
    if num_valid is not None:
        is_accepted = is_accepted & _is_valid(draft_tokens, num_valid)
    num_accepted = is_accepted.cumprod(dim=-1, dtype=torch.long).sum(dim=-1)  # [B]
    return _extended(
        draft_tokens, draft_probs, num_valid, target_probs, num_accepted, 1.0, resample_uniforms
    )


def verify_block(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    num_valid: Tensor | None,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    resample_uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Speculative sampling of a chain, block by block: no lossless rule accepts more of one path.

    With `P_0 = 1` and `P_i = min(1, P_{i-1} * target_i / draft_i)` of draft token i = 1..K, prefix
    i is accepted with probability `m_i / (m_i + 1 - P_i)`, where `m_i` is the mass of `max(0, P_i *
    target - draft)` over the row behind it, and the whole draft with `P_K`; the longest accepted
    prefix stands. The extra token is drawn from what the mass was taken of.

    Args and Returns: as `verify_chain`; `draft_probs` is needed (for point masses both rules are
    the same).

    Reference: Sun et al., arXiv:2403.10444, Alg. 2 (their M_b, M_s, gamma are our target, draft, K;
    their h_i is written above as a ratio of masses).
    """
    width = draft_tokens.shape[1]
    ratio = _at(target_probs[:, :width], draft_tokens).double()
    ratio = ratio / _at(draft_probs, draft_tokens)
    kept = [torch.ones_like(ratio[:, 0])]  # P_0
    for i in range(width):
        kept.append((kept[-1] * ratio[:, i]).clamp(max=1))
    kept = torch.stack(kept, dim=1)  # [B, K + 1]
    weights = kept[:, :width, None].to(target_probs.dtype) * target_probs[:, :width] - draft_probs
    mass = weights.clamp(min=0).sum(dim=-1, dtype=torch.float64)[:, 1:]  # [B, K - 1]
    longer = kept[:, 1:width]
    is_accepted = accept_uniforms[:, :-1] * (mass + 1 - longer) < mass  # prefixes 1..K - 1
    is_whole = accept_uniforms < kept[:, 1:]  # the rule where a prefix is all that was drafted
    is_accepted = torch.cat([is_accepted, is_whole[:, -1:]], dim=1)
    lengths = torch.arange(1, width + 1, device=draft_tokens.device)
    if num_valid is not None:
        is_accepted = torch.where(lengths == num_valid[:, None], is_whole, is_accepted)
        is_accepted = is_accepted & (lengths <= num_valid[:, None])
    num_accepted = (is_accepted * lengths).amax(dim=-1)  # [B]
    factor = kept.gather(1, num_accepted[:, None])
    return _extended(
        draft_tokens, draft_probs, num_valid, target_probs, num_accepted, factor, resample_uniforms
    )


def verify_points(
    draft_tokens: Tensor, num_valid: Tensor | None, target_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Accepts a draft token iff it is the target's token; the extra token is the target's.

    This is `verify_chain`, and `verify_block`, where every target law is a point mass, so that no
    draw can change anything; and it is the rule of coupled sampling.

    Args:
        draft_tokens: `[B, K]` int64.
        num_valid: `[B]` int64 tokens proposed per row, or `None` for K.
        target_tokens: `[B, K + 1]` the target's token at every place.

    Returns:
        As `verify_chain`.
    """
    width = draft_tokens.shape[1]
    is_accepted = draft_tokens == target_tokens[:, :width]
    if num_valid is not None:
        is_accepted = is_accepted & _is_valid(draft_tokens, num_valid)
    is_prefix = is_accepted.cumprod(dim=-1, dtype=torch.long)  # [B, K]
    tokens = target_tokens.clone()
    tokens[:, 1:].masked_fill_(is_prefix == 0, PAD_TOKEN)
    return tokens, is_prefix.sum(dim=-1)


def append_token(draft_tokens: Tensor, num_accepted: Tensor, extra: Tensor) -> Tensor:
    """`[B, K + 1]`: the first `num_accepted` `[B]` of the draft tokens `[B, K]`, then `extra`
    `[B]`, then `PAD_TOKEN`.
    """
    places = torch.arange(draft_tokens.shape[1], device=draft_tokens.device)
    tokens = torch.where(places < num_accepted[:, None], draft_tokens, PAD_TOKEN)
    tokens = torch.nn.functional.pad(tokens, (0, 1), value=PAD_TOKEN)
    return tokens.scatter(1, num_accepted[:, None], extra[:, None])


def find_faults(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    num_valid: Tensor | None,
    largest_logits: Tensor,
    num_accepted: Tensor,
) -> Tensor:
    """What is wrong with the inputs of a verdict.

    Args:
        draft_tokens: `[B, K]` int64.
        draft_probs: `[B, K, V]` or `None`.
        num_valid: `[B]` or `None`.
        largest_logits: `[B, K + 1]` of the target, NaN where one of a row is NaN.
        num_accepted: `[B]`; target rows beyond it do not matter.

    Returns:
        `[B]` int64, a sum of `Fault` values; 0 is none.
    """
    width = draft_tokens.shape[1]
    places = torch.arange(width + 1, device=draft_tokens.device)
    is_bad = ~largest_logits.isfinite() & (places <= num_accepted[:, None])
    faults = is_bad.any(dim=1) * int(Fault.TARGET_LOGITS)
    if draft_probs is None:
        return faults
    off = ~((draft_probs.sum(dim=-1) - 1).abs() <= LAW_TOLERANCE)  # NaN is off
    off = off | (draft_probs.amin(dim=-1) < 0)
    impossible = ~(_at(draft_probs, draft_tokens) > 0)
    if num_valid is not None:
        valid = _is_valid(draft_tokens, num_valid)
        off, impossible = off & valid, impossible & valid
    faults = faults + off.any(dim=1) * int(Fault.DRAFT_PROBS)
    return faults + impossible.any(dim=1) * int(Fault.DRAFT_TOKEN)


def _extended(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    num_valid: Tensor | None,
    target_probs: Tensor,
    num_accepted: Tensor,
    factor: Tensor | float,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Appends a token drawn from `max(0, factor * target - draft)` of the row behind the accepted
    prefix; `factor` is `[B, 1]`.
    """
    width = draft_tokens.shape[1]
    target_row = _row(target_probs, num_accepted)  # what the extra token is drawn from: [B, V]
    residual = target_row
    if width:
        place = num_accepted.clamp(max=width - 1)
        is_short = num_accepted < (width if num_valid is None else num_valid)
        if draft_probs is None:
            rejected = _readable(draft_tokens).gather(1, place[:, None])
            residual = target_row.scatter(-1, rejected, 0.0)
        else:
            scaled = target_row if isinstance(factor, float) else target_row * factor
            residual = scaled.to(target_row.dtype) - _row(draft_probs, place)
            residual = residual.clamp_(min=0)
        is_left = is_short & (residual.sum(dim=-1) > 0)
        residual = torch.where(is_left[:, None], residual, target_row)
    return append_token(draft_tokens, num_accepted, draw(residual, uniforms)), num_accepted


def _row(table: Tensor, places: Tensor) -> Tensor:
    """`[B, V]`: of each batch row of a table `[B, N, V]`, the row at its place `[B]`."""
    rows, count, _ = table.shape
    first = torch.arange(0, rows * count, count, device=places.device)
    return table.flatten(0, 1).index_select(0, first + places)


def _at(probs: Tensor, tokens: Tensor) -> Tensor:
    """`[B, K]` probabilities of the tokens."""
    return probs.gather(-1, _readable(tokens)[..., None])[..., 0]


def _readable(tokens: Tensor) -> Tensor:
    """Token ids, 0 in slots that hold none."""
    return tokens.clamp(min=0)


def _is_valid(draft_tokens: Tensor, num_valid: Tensor) -> Tensor:
    """`[B, K]` bool: slots that hold a draft token."""
    return torch.arange(draft_tokens.shape[1], device=num_valid.device) < num_valid[:, None]
