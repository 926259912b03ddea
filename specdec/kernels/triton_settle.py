"""Device functions that end a verdict: the extra token of a row is drawn, and the row written.

Legend: B rows, K draft tokens (width), V vocabulary, C chunks of a row, P >= K + 1 a power of two.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_decide import (
    Chain,
    choose_prefix,
    decide,
    judge_laws,
    judge_target,
    judge_tokens,
    read_draft_tokens,
)
from specdec.kernels.triton_launch import overlap, wait_for_last
from specdec.kernels.triton_laws import Laws, pass_gate, read_gate, read_logits
from specdec.kernels.triton_residual import Residuals, read_draft, read_masses, take_off
from specdec.kernels.triton_rows import Measures, find_past, pick, pick_law, weigh
from specdec.types import PAD_TOKEN

PAD = tl.constexpr(PAD_TOKEN)


class Outcome(NamedTuple):
    """What a verdict fills: tokens `[B, K + 1]`, num_accepted `[B]` and faults `[B]`, int64."""

    tokens: Tensor
    num_accepted: Tensor
    faults: Tensor


def settle_rows(
    rule: str,
    chain: Chain,
    laws: Laws,
    measures: Measures,
    residuals: Residuals | None,
    outcome: Outcome,
    *,
    block: int,
    num_warps: int,
) -> None:
    """Settles all rows in one launch, behind those that measured them and took the draft off."""
    rows, width = chain.tokens.shape
    _settle_kernel[(rows,)](
        chain,
        laws,
        measures,
        residuals,
        outcome,
        rule=rule,
        width=width,
        padded_places=triton.next_power_of_2(width + 1),
        block=block,
        padded_chunks=triton.next_power_of_2(measures.chunks),
        num_warps=num_warps,
        enable_fp_fusion=False,  # as where the draft is taken off
        **overlap(laws.logits),
    )


@triton.jit
def weigh_left(chain, laws, law, row, place, rule: tl.constexpr, removed, is_residual, factor, ids):
    """Weights that the extra token is drawn by: of the residual, if it `is_residual`, else of the
    target's row without the token `removed`.
    """
    gate = read_gate(laws, row, place)
    if rule == "point":
        x = pass_gate(laws, gate, ids, read_logits(laws, row, place, ids))
        return tl.where(ids == removed, 0.0, weigh(laws, gate[0], law, 1.0, ids, x))
    else:
        x = read_logits(laws, row, place, ids)
        if is_residual:
            draft = read_draft(chain, laws, row, place, ids)
            probs = take_off(laws, gate, law, factor, ids, x, draft)
        else:
            probs = weigh(laws, gate[0], law, 1.0, ids, pass_gate(laws, gate, ids, x))
        return probs


@triton.jit
def settle(
    chain,
    laws,
    measures,
    residuals,
    outcome,
    row,
    draft,
    rule: tl.constexpr,
    width: tl.constexpr,
    padded_places: tl.constexpr,
    block: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    """Draws a row's extra token from the chunk and the place in it on which the cumulative weight
    passes the threshold, and writes the row.
    """
    num_valid, token, _, q, u, threshold = draft
    place = tl.arange(0, padded_places)
    decided, target, shares = decide(
        laws, measures, row, draft, rule, width, padded_places, block, padded_chunks
    )
    factor, fault = 1.0, judge_tokens(place, num_valid, q)
    if rule == "block":
        is_read = place < num_valid
        masses, draft_masses = read_masses(residuals, row, place, is_read, padded_chunks)
        count = choose_prefix(place, num_valid, decided, tl.sum(masses, axis=1), u)
        factor = pick(decided, place, count).to(tl.float32)
        left = pick(masses, place, count)  # 0 where count is not below num_valid
        fault |= judge_laws(is_read, tl.sum(draft_masses, axis=1))
    else:
        count = decided
        left = pick(shares, place, count)
        if rule == "chain":
            is_read = place < (count < num_valid).to(tl.int32)  # the only slot there is
            masses, draft_masses = read_masses(residuals, row, place, is_read, padded_chunks)
            left = pick(masses, place, 0)
            fault |= judge_laws(is_read, tl.sum(draft_masses, axis=1))
    fault |= judge_target(place, count, target[1])
    law, shares = pick_law(target, place, count), pick(shares, place, count)
    is_short = count < num_valid
    removed = tl.full((), -1, tl.int64)
    if rule == "point":
        removed = tl.where(is_short, pick(token, place, count), -1)
        # What is left of the token's chunk may be too small for a difference: it is read again.
        ids = removed // block * block + tl.arange(0, block)
        without = weigh_left(chain, laws, law, row, count, rule, removed, False, factor, ids)
        without = tl.sum(without, axis=0).to(tl.float64)
        left = tl.where(tl.arange(0, padded_chunks) == removed // block, without, left)
    is_residual = is_short & (tl.sum(left, axis=0) > 0)
    removed = tl.where(is_residual, removed, -1)
    shares = tl.where(is_residual, left, shares)
    threshold *= tl.sum(shares, axis=0)
    chunk, before = find_past(shares, threshold, padded_chunks)
    first = tl.minimum(chunk, measures.chunks - 1) * block  # past the end only where all is NaN
    ids = first + tl.arange(0, block)
    weights = weigh_left(chain, laws, law, row, count, rule, removed, is_residual, factor, ids)
    index, _ = find_past(weights, (threshold - before).to(tl.float32), block)
    extra = tl.minimum(first + index, laws.vocab - 1).to(tl.int64)
    written = tl.where(place == count, extra, tl.where(place < count, token, PAD))
    into = outcome.tokens + tl.cast(row, tl.int64) * (width + 1)
    tl.store(into + place, written, mask=place <= width)
    tl.store(outcome.num_accepted + row, count.to(tl.int64))
    tl.store(outcome.faults + row, fault)


@triton.jit
def _settle_kernel(
    chain,
    laws,
    measures,
    residuals,
    outcome,
    is_early: tl.constexpr,
    rule: tl.constexpr,
    width: tl.constexpr,
    padded_places: tl.constexpr,
    block: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    row = tl.program_id(0)
    draft = read_draft_tokens(chain, laws, row, rule, width, padded_places)
    wait_for_last(is_early)
    settle(
        chain,
        laws,
        measures,
        residuals,
        outcome,
        row,
        draft,
        rule,
        width,
        padded_places,
        block,
        padded_chunks,
    )
