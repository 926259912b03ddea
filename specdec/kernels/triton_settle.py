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
    judge_laws,
    judge_target,
    judge_tokens,
)
from specdec.kernels.triton_laws import pass_gate, read_gate, read_logits
from specdec.kernels.triton_residual import read_draft, read_masses, take_off
from specdec.kernels.triton_rows import find_past, pick, pick_law, weigh
from specdec.types import PAD_TOKEN

PAD = tl.constexpr(PAD_TOKEN)
GROUP = tl.constexpr(16)  # tokens that are drawn from in the end


class Outcome(NamedTuple):
    """What a verdict fills: tokens `[B, K + 1]`, num_accepted `[B]` and faults `[B]`, int64."""

    tokens: Tensor
    num_accepted: Tensor
    faults: Tensor


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
    padded_chunks: tl.constexpr,
):
    """Settles a row by the block rule, when all of its residuals are there."""
    num_valid, _, _, _, u, _ = draft
    place = tl.arange(0, padded_places)
    kept, target, shares = decide_block(
        laws, measures, row, draft, width, padded_places, block, padded_chunks
    )
    is_read = place < num_valid
    masses, draft_masses = read_masses(residuals, row, place, is_read, padded_chunks)
    count = choose_prefix(place, num_valid, kept, tl.sum(masses, axis=1), u)
    fault = judge_laws(is_read, tl.sum(draft_masses, axis=1))
    fault |= judge_target(place, count, target[1])
    law, shares = pick_law(target, place, count), pick(shares, place, count)
    left = pick(masses, place, count)  # 0 where count is not below num_valid
    factor = pick(kept, place, count).to(tl.float32)
    _emit(
        chain,
        laws,
        measures,
        outcome,
        row,
        draft,
        count,
        law,
        shares,
        left,
        factor,
        fault,
        "block",
        width,
        padded_places,
        block,
        padded_chunks,
    )


@triton.jit
def settle_tokens(
    chain,
    laws,
    measures,
    residuals,
    outcome,
    row,
    draft,
    decision,
    rule: tl.constexpr,
    width: tl.constexpr,
    padded_places: tl.constexpr,
    block: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    """Settles a row by the decision of `decide_tokens`, with draft laws when its residual is
    there.
    """
    count, law, shares, fault = decision
    left = shares
    if rule == "chain":
        index = tl.arange(0, 1)  # of the only residual
        is_read = index < (count < draft[0]).to(tl.int32)
        masses, draft_masses = read_masses(residuals, row, index, is_read, padded_chunks)
        left = pick(masses, index, 0)
        fault |= judge_laws(is_read, tl.sum(draft_masses, axis=1))
    _emit(
        chain,
        laws,
        measures,
        outcome,
        row,
        draft,
        count,
        law,
        shares,
        left,
        1.0,
        fault,
        rule,
        width,
        padded_places,
        block,
        padded_chunks,
    )


@triton.jit
def _emit(
    chain,
    laws,
    measures,
    outcome,
    row,
    draft,
    count,
    law,
    shares,
    left,
    factor,
    fault,
    rule: tl.constexpr,
    width: tl.constexpr,
    padded_places: tl.constexpr,
    block: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    """Draws a row's extra token, from the chunk, the group in it and the place in that on which the
    cumulative weight passes the threshold, and writes the row. Of its place are known the law, and
    the probabilities of chunks `[C]` and what is left of them where the draft is taken off.
    """
    num_valid, token, _, q, _, threshold = draft
    place = tl.arange(0, padded_places)
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
    group: tl.constexpr = GROUP if block > GROUP else block
    ids = first + tl.arange(0, block)
    weights = weigh_left(chain, laws, law, row, count, rule, removed, is_residual, factor, ids)
    weights = tl.sum(tl.reshape(weights, (block // group, group)), axis=1)
    threshold = (threshold - before).to(tl.float32)
    index, before = find_past(weights, threshold, block // group)
    first += tl.minimum(index, block // group - 1) * group
    ids = first + tl.arange(0, group)
    weights = weigh_left(chain, laws, law, row, count, rule, removed, is_residual, factor, ids)
    index, _ = find_past(weights, threshold - before, group)
    extra = tl.minimum(first + index, laws.vocab - 1).to(tl.int64)
    written = tl.where(place == count, extra, tl.where(place < count, token, PAD))
    into = outcome.tokens + tl.cast(row, tl.int64) * (width + 1)
    tl.store(into + place, written, mask=place <= width)
    tl.store(outcome.num_accepted + row, count.to(tl.int64))
    tl.store(outcome.faults + row, fault | judge_tokens(place, num_valid, q))
