"""The last launch of a verdict: one program per row draws its extra token and writes the row.

Legend: B rows, K draft tokens (width), V vocabulary, C chunks of a row, P >= K + 1 a power of two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_decide import (
    Chain,
    Residuals,
    accept_tokens,
    choose_prefix,
    count_valid,
    follow_path,
    judge_laws,
    judge_target,
    weigh_tokens,
)
from specdec.kernels.triton_rows import (
    Laws,
    Measures,
    combine,
    find_past,
    pick,
    pick_law,
    point_to,
    read_gate,
    read_logits,
    weigh,
)
from specdec.types import PAD_TOKEN

PAD = tl.constexpr(PAD_TOKEN)


def settle(
    rule: str,
    chain: Chain,
    laws: Laws,
    measures: Measures,
    residuals: Residuals | None,
    *,
    block: int,
    num_warps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Decides each row and draws its extra token.

    Args:
        rule: "point", "chain" or "block".
        chain: the draft and the draws.
        laws: the target's.
        measures: of every row that matters.
        residuals: of the soft rules.
        block: tokens of a chunk.
        num_warps: of each row's program.

    Returns:
        tokens `[B, K + 1]`, num_accepted `[B]` and faults `[B]`.
    """
    rows, width = chain.tokens.shape
    tokens = torch.empty(rows, width + 1, dtype=torch.long, device=chain.tokens.device)
    num_accepted, faults = (torch.empty_like(tokens[:, 0]) for _ in range(2))
    _settle_kernel[(rows,)](
        chain,
        laws,
        measures,
        residuals,
        tokens,
        num_accepted,
        faults,
        rule=rule,
        width=width,
        padded_places=triton.next_power_of_2(width + 1),
        block=block,
        padded_chunks=triton.next_power_of_2(measures.chunks),
        num_warps=num_warps,
    )
    return tokens, num_accepted, faults


@triton.jit
def subtract(probs, draft, factor):
    """`max(0, factor * target - draft)`; NaN stays, so that the residual is refused."""
    left = probs * factor - draft
    return tl.where(left < 0, 0.0, left)


@triton.jit
def _shares_without(token, laws, gate, law, row, place, shares, block: tl.constexpr):
    """Probabilities of the chunks without one token, whose chunk is read again: what is left of it
    may be too small for a difference.
    """
    ids = token // block * block + tl.arange(0, block)
    probs = weigh(laws, gate, law, ids, read_logits(laws, row, place, ids))
    share = tl.sum(tl.where(ids == token, 0.0, probs).to(tl.float64), axis=0)
    return tl.where(tl.arange(0, shares.shape[0]) == token // block, share, shares)


@triton.jit
def _masses_of_chunks(residuals, row, place, halves, padded_chunks: tl.constexpr):
    """`[C]` of a residual, from its first `halves` halves."""
    half = 2 * tl.arange(0, padded_chunks)[:, None] + tl.arange(0, 2)[None]
    slots = (tl.cast(row, tl.int64) * residuals.places + place) * residuals.halves + half
    return tl.sum(tl.load(residuals.mass + slots, mask=half < halves, other=0.0), axis=1)


@triton.jit
def _settle_kernel(
    chain,
    laws,
    measures,
    residuals,
    tokens,
    num_accepted,
    faults,
    rule: tl.constexpr,
    width: tl.constexpr,
    padded_places: tl.constexpr,
    block: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    row = tl.program_id(0)
    place = tl.arange(0, padded_places)
    num_valid = count_valid(chain, row, width)
    rate, _, _, _ = read_gate(laws, row, 0)
    target, shares = combine(measures, laws, row, place, rate, block, padded_chunks)
    p, q, fault = weigh_tokens(chain, laws, row, place, num_valid, target, width)
    factor = 1.0
    if rule == "block":
        kept = follow_path(place, p, q, width)
        count = choose_prefix(chain, residuals, row, place, num_valid, kept, width, padded_chunks)
        factor = pick(kept, place, count).to(tl.float32)
        fault |= judge_laws(residuals, row, place, place < num_valid, padded_chunks)
    else:
        count = accept_tokens(chain, row, place, num_valid, p, q, width)
    fault |= judge_target(place, count, target[1])
    gate, law = read_gate(laws, row, count), pick_law(target, place, count)
    shares = pick(shares, place, count)
    is_short = count < num_valid
    drafted = chain.tokens + tl.cast(row, tl.int64) * width
    rejected = tl.load(drafted + count, mask=is_short, other=-1)
    left = shares
    if rule == "point":
        if is_short:
            left = _shares_without(rejected, laws, gate, law, row, count, shares, block)
    else:
        drawn_place = count
        if rule == "chain":
            drawn_place = count * 0  # the only place there is
            is_read = place < is_short.to(tl.int32)
            fault |= judge_laws(residuals, row, place, is_read, padded_chunks)
        halves = tl.where(is_short, residuals.halves, 0)
        left = _masses_of_chunks(residuals, row, drawn_place, halves, padded_chunks)
    is_residual = is_short & (tl.sum(left, axis=0) > 0)
    shares = tl.where(is_residual, left, shares)
    threshold = tl.load(chain.resample + tl.cast(row, tl.int64) * chain.resample_stride)
    threshold = threshold * tl.sum(shares, axis=0)
    chunk, before = find_past(shares, threshold, padded_chunks)
    chunk = tl.minimum(chunk, measures.chunks - 1)  # past the end only where all is NaN
    ids = chunk * block + tl.arange(0, block)
    probs = weigh(laws, gate, law, ids, read_logits(laws, row, count, ids))
    if rule == "point":
        probs = tl.where(ids == tl.where(is_residual, rejected, -1), 0.0, probs)
    elif is_residual:
        draft = point_to(chain.probs, row, count, chain.row_stride, chain.place_stride)
        draft = tl.load(draft + ids, mask=ids < laws.vocab, other=0.0).to(tl.float32)
        probs = subtract(probs, draft, factor)
    index, _ = find_past(probs.to(tl.float64), threshold - before, block)
    extra = tl.minimum(chunk * block + index, laws.vocab - 1).to(tl.int64)
    written = tl.load(drafted + place, mask=place < count, other=PAD)
    written = tl.where(place == count, extra, written)
    into = tokens + tl.cast(row, tl.int64) * (width + 1)
    tl.store(into + place, written, mask=place <= width)
    tl.store(num_accepted + row, count.to(tl.int64))
    tl.store(faults + row, fault)
