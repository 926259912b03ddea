"""Device functions that decide how much of a drafted chain stands; see `reference.verify_chain` and
`reference.verify_block`, whose letters are used. All places of a row are decided at once.

Legend: B rows, K draft tokens (width), V vocabulary, C chunks of a row, P >= K + 1 a power of two.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import SHARED
from specdec.kernels.triton_laws import pass_gate, point_to, read_gate, read_logits, with_dense_rows
from specdec.kernels.triton_rows import combine, pick, weigh
from specdec.types import Fault

TARGET_LOGITS = tl.constexpr(int(Fault.TARGET_LOGITS))
DRAFT_PROBS = tl.constexpr(int(Fault.DRAFT_PROBS))
DRAFT_TOKEN = tl.constexpr(int(Fault.DRAFT_TOKEN))


class Chain(NamedTuple):
    """A draft and the draws that decide it; a kernel takes it as one argument.

    Args:
        tokens: `[B, K]` int64, contiguous.
        probs: `[B, K, V]` of any strides whose last is 1; `None` for point masses.
        row_stride: of `probs`.
        place_stride: of `probs`.
        num_valid: `[B]` int64, or `None` for K.
        accept: `[B, K]` float64.
        accept_row_stride: of `accept`.
        accept_place_stride: of `accept`.
        resample: `[B]` float64.
        resample_stride: of `resample`.
    """

    tokens: Tensor
    probs: Tensor | None
    row_stride: int
    place_stride: int
    num_valid: Tensor | None
    accept: Tensor
    accept_row_stride: int
    accept_place_stride: int
    resample: Tensor
    resample_stride: int


def chain_of(
    tokens: Tensor,
    probs: Tensor | None,
    num_valid: Tensor | None,
    accept: Tensor,
    resample: Tensor,
) -> Chain:
    """Arguments for kernels; Args as `Chain`."""
    probs = None if probs is None else with_dense_rows(probs)
    strides = (0, 0) if probs is None else probs.stride()[:2]
    num_valid = None if num_valid is None else num_valid.contiguous()
    draws = accept, *accept.stride(), resample, *resample.stride()
    return Chain(tokens.contiguous(), probs, *strides, num_valid, *draws)


@triton.jit
def count_valid(chain, row, width: tl.constexpr):
    """How many of a row's draft tokens are up for decision."""
    count = tl.full((), width, tl.int64)
    if chain.num_valid is not None:
        count = tl.load(chain.num_valid + row, cache_modifier=SHARED)
    return count


@triton.jit
def read_draft_tokens(
    chain, laws, row, rule: tl.constexpr, width: tl.constexpr, padded_places: tl.constexpr
):
    """All that a decision needs but the target's measures, to be read while these are made: how
    many tokens are up for decision; `[P]` the tokens, their logits behind the gate, their draft
    probabilities, and the draws, by the block rule in the place behind; the extra token's draw; and
    the fault if a draft law forbids its token.
    """
    place, num_valid = tl.arange(0, padded_places), count_valid(chain, row, width)
    start = chain.tokens + tl.cast(row, tl.int64) * width
    token = tl.load(start + place, mask=place < num_valid, other=-1, cache_modifier=SHARED)
    x = read_logits(laws, row, place, token, is_early=True)
    x = pass_gate(laws, read_gate(laws, row, place), token, x)
    q = tl.full((padded_places,), 1.0, tl.float64)
    if rule != "point":
        start = point_to(chain.probs, row, place, chain.row_stride, chain.place_stride)
        is_token = (token >= 0) & (token < laws.vocab)
        q = tl.load(start + token, mask=is_token, other=0.0, cache_modifier=SHARED).to(tl.float64)
    draw = place - 1 if rule == "block" else place
    start = point_to(chain.accept, row, draw, chain.accept_row_stride, chain.accept_place_stride)
    u = tl.load(start, mask=(draw >= 0) & (draw < width), other=0.0, cache_modifier=SHARED)
    start = chain.resample + tl.cast(row, tl.int64) * chain.resample_stride
    extra = tl.load(start, cache_modifier=SHARED)
    is_forbidden = (place < num_valid) & ((q > 0) == 0)  # a q that is NaN is not above 0
    fault = tl.max(is_forbidden.to(tl.int32), axis=0).to(tl.int64) * DRAFT_TOKEN
    return num_valid, token, x, q, u, extra, fault


@triton.jit
def follow_path(place, p, q, width: tl.constexpr):
    """P_0..P_K, `[P]` float64."""
    ratio = p / q
    kept = tl.full(place.shape, 1.0, tl.float64)
    share = tl.full((), 1.0, tl.float64)
    for i in tl.static_range(width):
        share = share * pick(ratio, place, i)
        share = tl.where(share > 1, 1.0, share)  # NaN stays, and is never accepted
        kept = tl.where(place == i + 1, share, kept)
    return kept


@triton.jit
def choose_prefix(place, num_valid, kept, mass, u):
    """The longest prefix that stands by the block rule, given the residuals' masses `[P]`."""
    is_accepted = (place < num_valid) & (u * (mass + 1 - kept) < mass)
    is_whole = (place == num_valid) & (u < kept)
    return tl.max(tl.where((place > 0) & (is_accepted | is_whole), place, 0), axis=0)


@triton.jit
def judge_draft(is_read, mass):
    """The fault if a draft law that is read has another mass than 1; its tolerance is the
    definition's.
    """
    return (is_read & ((tl.abs(mass - 1) <= 1e-3) == 0)).to(tl.int64) * DRAFT_PROBS  # NaN too


@triton.jit
def judge_target(law):
    """The fault if the target's law is none."""
    return (law[1] != law[1]).to(tl.int64) * TARGET_LOGITS


@triton.jit
def _weigh_drafted(
    laws,
    measures,
    row,
    draft,
    padded_places: tl.constexpr,
    block: tl.constexpr,
    padded_chunks: tl.constexpr,
    is_awaited: tl.constexpr,
):
    """The target's probabilities `[P]` of a row's draft tokens, and what `combine` gives."""
    num_valid, token, x, _, _, _, _ = draft
    place = tl.arange(0, padded_places)
    rate = read_gate(laws, row, 0)[0]
    target, shares = combine(
        measures, laws, row, place, num_valid, rate, block, padded_chunks, is_awaited
    )
    return weigh(laws, rate, target, 1.0, token, x).to(tl.float64), target, shares


@triton.jit
def decide_block(
    laws,
    measures,
    row,
    draft,
    width: tl.constexpr,
    padded_places: tl.constexpr,
    block: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    """P_0..P_K of a row when it is measured, with the target's laws and the probabilities of their
    chunks. `draft` is of `read_draft_tokens`.
    """
    p, target, shares = _weigh_drafted(
        laws, measures, row, draft, padded_places, block, padded_chunks, True
    )
    return follow_path(tl.arange(0, padded_places), p, draft[3], width), target, shares


@triton.jit
def _first_place(rank, largest, scale, best, other, other_largest, other_scale, other_best):
    is_first = rank < other
    return (
        tl.where(is_first, rank, other),
        tl.where(is_first, largest, other_largest),
        tl.where(is_first, scale, other_scale),
        tl.where(is_first, best, other_best),
    )


@triton.jit
def decide_tokens(
    laws,
    measures,
    row,
    draft,
    padded_places: tl.constexpr,
    block: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    """How many tokens of a row stand that an earlier launch measured, and the target's law at the
    place behind them; with the probabilities of all places' chunks. `draft` is of
    `read_draft_tokens`.
    """
    p, target, shares = _weigh_drafted(
        laws, measures, row, draft, padded_places, block, padded_chunks, False
    )
    num_valid, _, _, q, u, _, _ = draft
    place = tl.arange(0, padded_places)
    largest, scale, best = target
    is_accepted = (place < num_valid) & (u * q < p)
    if laws.gate.is_greedy is not None:  # whose token has probability 1 in what is no law, too
        is_accepted &= scale == scale
    rank = tl.where(is_accepted, padded_places, place)
    law = tl.reduce((rank, largest, scale, best), 0, _first_place)
    return law[0], (law[1], law[2], law[3]), shares
