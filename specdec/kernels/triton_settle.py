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
    point_to,
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
def read_draft(chain, row, place, ids, limit):
    """Draft probabilities of tokens `ids` as they are stored, 0 from token `limit` on."""
    start = point_to(chain.probs, row, place, chain.row_stride, chain.place_stride)
    return tl.load(start + ids, mask=ids < limit, other=0.0, eviction_policy="evict_first")


@triton.jit
def subtract(probs, draft, factor):
    """`max(0, factor * target - draft)`; NaN stays, so that the residual is refused."""
    left = probs * factor - draft
    return tl.where(left < 0, 0.0, left)


@triton.jit
def _share_without(token, laws, row, place, law, block: tl.constexpr):
    """The probability of a token's chunk without the token. It is read again: what is left may be
    too small for a difference.
    """
    largest, scale, best = law
    ids = token // block * block + tl.arange(0, block)
    x = read_logits(laws, row, place, ids, laws.vocab, "")
    probs = weigh(laws, row, place, ids, x, largest, scale, best)
    return tl.sum(tl.where(ids == token, 0.0, probs).to(tl.float64), axis=0)


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
    chunks = measures.chunks
    place, chunk = tl.arange(0, padded_places), tl.arange(0, padded_chunks)
    num_valid = count_valid(chain, row, width)
    largest, scale, best, shares = combine(measures, laws, row, place, block, padded_chunks)
    target = largest, scale, best
    p, q, fault = weigh_tokens(chain, laws, row, place, num_valid, target, width)
    factor = 1.0
    if rule == "block":
        kept = follow_path(place, p, q, width)
        count = choose_prefix(
            chain, residuals, chunks, row, place, num_valid, kept, width, padded_chunks
        )
        factor = pick(kept, place, count).to(tl.float32)
        fault |= judge_laws(residuals, chunks, row, place, place < num_valid, padded_chunks)
    else:
        count = accept_tokens(chain, row, place, num_valid, p, q, width)
    fault |= judge_target(place, count, scale)
    law = pick(largest, place, count), pick(scale, place, count), pick(best, place, count)
    shares = pick(shares, place, count)
    is_short = count < num_valid
    start = chain.tokens + tl.cast(row, tl.int64) * width
    rejected = tl.load(start + count, mask=is_short, other=-1)
    left = shares
    if rule == "point":
        if is_short:
            share = _share_without(rejected, laws, row, count, law, block)
            left = tl.where(chunk == rejected // block, share, shares)
    else:
        drawn_place = count
        if rule == "chain":
            drawn_place = count * 0
            is_drawn = place < is_short.to(tl.int32)  # the only place there is
            fault |= judge_laws(residuals, chunks, row, place, is_drawn, padded_chunks)
        slots = (tl.cast(row, tl.int64) * residuals.places + drawn_place) * chunks + chunk
        computed = tl.where(is_short, chunks, 0)
        left = tl.load(residuals.mass + slots, mask=chunk < computed, other=0.0)
    is_residual = is_short & (tl.sum(left, axis=0) > 0)
    shares = tl.where(is_residual, left, shares)
    threshold = tl.load(chain.resample + tl.cast(row, tl.int64) * chain.resample_stride)
    threshold = threshold * tl.sum(shares, axis=0)
    drawn, before = find_past(shares, threshold, padded_chunks)
    drawn = tl.minimum(drawn, chunks - 1)  # past the end only where all is NaN
    ids = drawn * block + tl.arange(0, block)
    x = read_logits(laws, row, count, ids, laws.vocab, "")
    probs = weigh(laws, row, count, ids, x, law[0], law[1], law[2])
    if rule == "point":
        probs = tl.where(ids == tl.where(is_residual, rejected, -1), 0.0, probs)
    elif is_residual:
        draft = read_draft(chain, row, count, ids, laws.vocab).to(tl.float32)
        probs = subtract(probs, draft, factor)
    index, _ = find_past(probs.to(tl.float64), threshold - before, block)
    extra = tl.minimum(drawn * block + index, laws.vocab - 1).to(tl.int64)
    drafted = tl.load(start + place, mask=place < count, other=PAD)
    written = tl.where(place == count, extra, drafted)
    into = tokens + tl.cast(row, tl.int64) * (width + 1)
    tl.store(into + place, written, mask=place <= width)
    tl.store(num_accepted + row, count.to(tl.int64))
    tl.store(faults + row, fault)
