"""`find_floor` on a GPU, without sorting rows: one launch, behind one that clears its counters.

A row is visited twice. Where top-p is sought, the first visit measures the law, and the program
that ends it chooses, by a sample, between which logits to look. The second visit lists the tokens
there, and the program that ends it finds the floor among them. Rows with top-k are not measured:
their largest tokens are listed, and what follows is found among those. Where the sample misled, or
too many tokens would be listed, the floor is found among all of a row's tokens, more slowly.

Legend: B rows, N places of a window, V vocabulary; a spot is row * N + place.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gate import Floor, Gate, Truncation
from specdec.kernels.triton_launch import announce, overlap, wait, wait_for_last
from specdec.kernels.triton_laws import INFINITY, from_key, laws_of, point_to
from specdec.kernels.triton_rows import find_span, measure, new_measures
from specdec.kernels.triton_select import (
    COUNT,
    LEAST_KEY,
    search,
    search_pair,
    weigh,
    weigh_list,
)
from specdec.kernels.triton_shortlist import bracket, list_span, new_shortlist

BLOCK = 4096
NUM_WARPS = 8
REGISTERS = 64  # of a thread
SPAN = 4
LAG = 64
SAMPLES = 4096
MOST_LISTED = 16384
PART = 512


def find_floor(
    logits: Tensor,
    temperature: Tensor | None,
    truncation: Truncation,
    *,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
    span: int | None = None,
    lag: int = LAG,
    samples: int = SAMPLES,
    most: int = MOST_LISTED,
    part: int = PART,
) -> Floor:
    """As `gate.find_floor`, of a floor that keeps the same tokens.

    Args:
        logits: `[B, V]` or `[B, N, V]`.
        temperature: `[B]` or `None`.
        truncation: what to keep.
        block: tokens of a chunk.
        num_warps: of a program.
        span: chunks of a program; `None` goes by how many there are.
        lag: rows that are measured ahead.
        samples: tokens of a sample, a power of two.
        most: tokens that can be listed of a row.
        part: tokens that are read at a time in the search.
    """
    shape, device = logits.shape[:-1], logits.device
    window = logits[:, None] if logits.dim() == 2 else logits
    gate = Gate(temperature)
    floor = Floor(
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.long, device=device),
    )
    measures, spots = new_measures(window, gate, block), floor.ids.numel()
    span, lag = span or find_span(spots, measures.chunks, SPAN), min(lag, spots)
    columns = [None if t is None else t.contiguous() for t in truncation[:3]]
    with torch.cuda.device_of(logits):
        _floor_kernel[((spots + lag) * 2 * triton.cdiv(measures.chunks, span),)](
            laws_of(window, gate),
            Truncation(*columns),
            measures,
            new_shortlist(measures, min(most, logits.shape[-1]), logits.shape[-1]),
            floor,
            spots,
            lag,
            span,
            block=block,
            threads=32 * num_warps,
            samples=samples,
            part=part,
            padded_chunks=triton.next_power_of_2(measures.chunks),
            num_warps=num_warps,
            maxnreg=REGISTERS,
            **overlap(logits),
        )
    return floor


@triton.jit
def _read_demand(laws, truncation, row):
    """What a row asks for: top_k, at most the vocabulary, 0 for all; tail, -1 for all; min_p, 0 for
    all; the temperature; and whether its tokens are to be measured before they are listed.
    """
    top_k, tail = tl.full((), 0, tl.int64), tl.full((), -1.0, tl.float64)
    min_p, temperature = tl.full((), 0.0, tl.float32), tl.full((), 1.0, tl.float32)
    if truncation.top_k is not None:
        top_k = tl.minimum(tl.load(truncation.top_k + row), laws.vocab)
    if truncation.tail is not None:
        tail = tl.load(truncation.tail + row).to(tl.float32).to(tl.float64)
    if truncation.min_p is not None:
        min_p = tl.load(truncation.min_p + row).to(tl.float32)
    if laws.gate.temperature is not None:
        temperature = tl.load(laws.gate.temperature + row).to(tl.float32)
    return top_k, tail, min_p, temperature, (top_k == 0) & (tail >= 0)


@triton.jit
def _find(laws, measures, shortlist, floor, start, spot, demand, spans, part, padded_chunks):
    """Writes the floor of a row that is listed."""
    top_k, tail, min_p, temperature, is_measured = demand
    index, slot = tl.arange(0, padded_chunks), tl.cast(spot, tl.int64) * shortlist.most
    found = shortlist.found + tl.cast(spot, tl.int64) * measures.chunks + index
    found = tl.load(found, index < spans, tl.where(is_measured, 0.0, -INFINITY))
    peak, unit = tl.max(found, axis=0), shortlist.unit
    if is_measured:
        peak = tl.load(shortlist.peak + spot)
    peak = tl.div_rn(peak, temperature)
    tokens, keys, masses = shortlist.tokens + slot, shortlist.keys + slot, shortlist.masses + slot
    count = tl.load(shortlist.counters + 4 * spot + 3)
    is_listed = (count >= top_k) & (count > 0) & (count <= shortlist.most)
    least, before = tl.full((), LEAST_KEY, tl.int32), tl.full((), 0, tl.int64)
    at, tie = tl.full((), -INFINITY, tl.float32), tl.full((), 0, tl.int64)
    budget = before
    if is_listed:
        mass = weigh_list(tokens, keys, masses, count, start, temperature, peak, unit, part)
        if is_measured:
            left = tail * tl.load(shortlist.total + spot) - tl.sum(found.to(tl.float64), axis=0)
            budget = tl.floor(left * unit).to(tl.int64)
            is_open = tl.load(shortlist.bracket + 2 * spot + 1) == INFINITY
            is_listed = (budget >= 0) & ((mass > budget) | is_open)
    among = tl.where(is_listed, count, laws.vocab)
    row = is_listed, tokens, keys, masses, among, start, temperature, peak, unit
    if top_k > 0:
        least, _ = search(row, least, among - top_k, 0, COUNT, part)
        at = from_key(least, tl.float32)
    if tail >= 0:
        if (top_k > 0) | (is_listed == 0):
            before, mass = weigh(row, least, part)
            budget = before + tl.floor(tail * mass.to(tl.float64)).to(tl.int64)
        at, tie = search_pair(row, least, before, budget, part)
    bound = peak + tl.log(min_p)
    tie = tl.where(bound > at, 0, tie)
    at = tl.where(bound > at, bound, at)
    tl.store(floor.logits + spot, at)
    tl.store(floor.ids + spot, tie)


@triton.jit
def _floor_kernel(
    laws,
    truncation,
    measures,
    shortlist,
    floor,
    spots,
    lag,
    span,
    is_early: tl.constexpr,
    block: tl.constexpr,
    threads: tl.constexpr,
    samples: tl.constexpr,
    part: tl.constexpr,
    padded_chunks: tl.constexpr,
):
    wait_for_last(is_early)
    spans = tl.cdiv(measures.chunks, span)
    turn, item = tl.program_id(0) // (2 * spans), tl.program_id(0) % (2 * spans)
    is_first = item < spans
    spot = tl.where(is_first, turn, turn - lag)
    if (spot >= 0) & (spot < spots):
        row, place = spot // laws.places, spot % laws.places
        start = point_to(laws.logits, row, place, laws.row_stride, laws.place_stride)
        demand = _read_demand(laws, truncation, row)
        top_k, tail, min_p, _, is_measured = demand
        visits = shortlist.counters + 4 * spot
        if (top_k == 0) & (tail < 0) & (min_p <= 0):
            tl.store(floor.logits + spot, -INFINITY)
            tl.store(floor.ids + spot, 0)
        elif is_first:
            is_last = item == 0
            if is_measured:
                last = tl.minimum((item + 1) * span, measures.chunks)
                for chunk in range(item * span, last):
                    measure(measures, laws, row, place, chunk, False, block, threads)
                is_last = announce(visits) == spans - 1
            if is_last:
                bracket(laws, measures, shortlist, start, spot, demand, samples, padded_chunks)
                announce(visits + 2)
        else:
            wait(visits + 2, 1)
            list_span(laws, measures, shortlist, start, spot, demand, item - spans, span, block)
            if announce(visits + 1) == spans - 1:
                _find(
                    laws,
                    measures,
                    shortlist,
                    floor,
                    start,
                    spot,
                    demand,
                    spans,
                    part,
                    padded_chunks,
                )
