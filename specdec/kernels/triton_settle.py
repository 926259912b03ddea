"""Device functions that end a verdict: the extra token of a row is drawn, and the row written.

Legend: B rows, K draft tokens (width), V vocabulary, C chunks of a row, P >= K + 1 a power of two.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_decide import (
    choose_prefix,
    decide_block,
    judge_draft,
    judge_target,
)
from specdec.kernels.triton_draw import draw, weigh_tokens
from specdec.kernels.triton_laws import read_gate
from specdec.kernels.triton_residual import read_masses, read_order
from specdec.kernels.triton_rows import add_both, pick, pick_law
from specdec.types import PAD_TOKEN

PAD = tl.constexpr(PAD_TOKEN)


class Outcome(NamedTuple):
    """What a verdict fills: tokens `[B, K + 1]`, num_accepted `[B]` and faults `[B]`, int64."""

    tokens: Tensor
    num_accepted: Tensor
    faults: Tensor


@triton.jit
def _either(one, other):
    return one | other


@triton.jit
def _draw_left(
    chain,
    laws,
    spot,
    order,
    left,
    shares,
    total,
    u,
    padded_chunks: tl.constexpr,
    block: tl.constexpr,
    warps: tl.constexpr,
):
    """The extra token where the draft is taken off: of what is `left` of the parts of its place, if
    their `total` is anything, else of the target's law; `shares` are the probabilities of all
    places' chunks.
    """
    if total > 0:
        parts: tl.constexpr = padded_chunks * warps
        part: tl.constexpr = block // warps
        token = draw(chain, laws, spot, order, -1, left, total, u, True, parts, part)
    else:
        own = pick(shares, tl.arange(0, shares.shape[0]), spot[1])
        total = tl.sum(own, axis=0)
        token = draw(chain, laws, spot, order, -1, own, total, u, False, padded_chunks, block)
    return token


@triton.jit
def _write(outcome, row, draft, count, extra, fault, width: tl.constexpr):
    _, token, _, _, _, _, forbidden = draft
    place = tl.arange(0, token.shape[0])
    written = tl.where(place == count, extra, tl.where(place < count, token, PAD))
    into = outcome.tokens + tl.cast(row, tl.int64) * (width + 1)
    tl.store(into + place, written, mask=place <= width)
    tl.store(outcome.num_accepted + row, count.to(tl.int64))
    tl.store(outcome.faults + row, fault | forbidden)


@triton.jit
def settle_block(
    chain,
    laws,
    measures,
    residuals,
    outcome,
    row,
    draft,
    width: tl.constexpr,
    padded_places: tl.constexpr,
    block: tl.constexpr,
    warps: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    """Settles a row by the block rule, when all of its residuals are there."""
    num_valid, _, _, _, u, extra_u, _ = draft
    place = tl.arange(0, padded_places)
    kept, target, shares = decide_block(
        laws, measures, row, draft, width, padded_places, block, padded_chunks
    )
    is_read = place < num_valid
    masses, draft_masses = read_masses(
        residuals, row, place[:, None], is_read[:, None], padded_chunks * warps, True
    )
    masses = masses.to(tl.float64)
    totals = tl.sum(masses, axis=1)
    count = choose_prefix(place, num_valid, kept, totals, u)
    # By the very numbers that the draft was taken off with: what has no mass must weigh nothing.
    told, factor = read_order(residuals, row, tl.minimum(count, width - 1))
    own, is_short = pick_law(target, place, count), count < num_valid
    law = (
        tl.where(is_short, told[0], own[0]),
        tl.where(is_short, told[1], own[1]),
        tl.where(is_short, told[2], own[2]),
    )
    order = read_gate(laws, row, count), law, factor
    left = pick(masses, place, count)  # 0 where count is not below num_valid
    total = pick(totals, place, count)
    extra = _draw_left(
        chain, laws, (row, count), order, left, shares, total, extra_u, padded_chunks, block, warps
    )
    fault = tl.where(place <= count, judge_target(target), 0)
    fault |= judge_draft(is_read, tl.sum(draft_masses, axis=1))
    fault = tl.reduce(fault, 0, _either)
    _write(outcome, row, draft, count, extra, fault, width)


@triton.jit
def settle_tokens(
    chain,
    laws,
    residuals,
    outcome,
    row,
    draft,
    decision,
    rule: tl.constexpr,
    width: tl.constexpr,
    padded_places: tl.constexpr,
    block: tl.constexpr,
    warps: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    """Settles a row by the decision of `decide_tokens`, with draft laws when its residual is
    there.
    """
    num_valid, token, _, _, _, u, _ = draft
    count, law, shares = decision
    place, spot = tl.arange(0, padded_places), (row, count)
    order = read_gate(laws, row, count), law, tl.full((), 1.0, tl.float32)
    fault = judge_target(law)  # of this row only, since one that is no law accepts nothing
    if rule == "chain":
        is_read = count < num_valid
        left, draft_masses = read_masses(residuals, row, 0, is_read, padded_chunks * warps, False)
        left = left.to(tl.float64)
        total, mass = tl.reduce((left, draft_masses), 0, add_both)
        fault |= judge_draft(is_read, mass)
        extra = _draw_left(
            chain, laws, spot, order, left, shares, total, u, padded_chunks, block, warps
        )
    else:
        shares = pick(shares, place, count)
        removed = tl.where(count < num_valid, pick(token, place, count), -1)
        # What is left of the token's chunk may be too small for a difference: it is read again.
        ids = removed // block * block + tl.arange(0, block)
        without = tl.sum(weigh_tokens(chain, laws, spot, order, removed, ids, False), axis=0)
        is_chunk = tl.arange(0, padded_chunks) == removed // block
        left = tl.where(is_chunk, without.to(tl.float64), shares)
        is_left = (removed >= 0) & (tl.sum(left, axis=0) > 0)
        removed, shares = tl.where(is_left, removed, -1), tl.where(is_left, left, shares)
        total = tl.sum(shares, axis=0)
        extra = draw(
            chain, laws, spot, order, removed, shares, total, u, False, padded_chunks, block
        )
    _write(outcome, row, draft, count, extra, fault, width)
