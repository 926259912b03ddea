"""What the Triton kernels share: rows of logits as kernel arguments, softmax partials, and the
search in a cumulative sum.

A row of V logits is cut into C chunks of `block` tokens. One launch reduces every chunk to its
largest logit and its sum of weights, the softmax partials. Later launches merge the partials of a
row and compute the probability of any token from its logit. The operations are the same everywhere
and multiply-add is never fused (`NO_FUSION`), so a probability has the same bits in every kernel: a
token whose weight was 0 in a sum is never drawn, and equal distributions subtract to 0.

Launches are ordinary: each reads what earlier launches wrote, and no program waits for another.

Legend: B rows, N window indices, V vocabulary, C chunks of a row, P window indices padded to a
power of two.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.types import Cutoff, FilterParams

LOG2_E = tl.constexpr(1.4426950408889634)
INFINITY = tl.constexpr(float("inf"))
GROUP = tl.constexpr(8)  # tokens
NO_FUSION = {"enable_fp_fusion": False}
"""Option of a launch: no fused multiply-add."""


class Table(NamedTuple):
    """A tensor `[B, N, ...]` as a kernel argument; rows and indices of any strides."""

    data: Tensor
    row_stride: int
    index_stride: int


class States(NamedTuple):
    """A tensor `[B, heads, N or S, width]` as a kernel argument; any strides whose last is 1."""

    data: Tensor
    row_stride: int
    head_stride: int
    index_stride: int


class Rows(NamedTuple):
    """Logits and how they become probabilities, as a kernel argument."""

    logits: Table  # [B, N, V]
    num_indices: int  # N
    vocab: int  # V
    params: FilterParams  # of the B rows; what is None there is compiled away


class Partials(NamedTuple):
    """Softmax partials of every chunk."""

    row_max: Tensor  # [B, N, C] float32, the chunk's largest logit
    row_sum: Tensor  # [B, N, C] float32, its sum of exp((logit - row_max) / temperature)
    best: Tensor | None  # [B, N, C] int32, first token of the largest logit; for greedy rows only
    num_chunks: int  # C


def table_of(tensor: Tensor) -> Table:
    """A tensor `[B, N]` or `[B, N, V]`; copied only if its rows of V are not contiguous."""
    if tensor.dim() == 3 and tensor.stride(2) != 1:
        tensor = tensor.contiguous()
    return Table(tensor, *tensor.stride()[:2])


def states_of(tensor: Tensor) -> States:
    """A tensor `[B, heads, N or S, width]`; copied only if its last stride is not 1."""
    tensor = tensor if tensor.stride(3) == 1 else tensor.contiguous()
    return States(tensor, *tensor.stride()[:3])


def rows_of(logits: Tensor, params: FilterParams) -> Rows:
    """Logits `[B, N, V]` with the parameters of their rows."""
    temperature, is_greedy = (None if t is None else t.contiguous() for t in params[:2])
    cutoff = params.cutoff and Cutoff(*(t.contiguous() for t in params.cutoff))
    _, num_indices, vocab = logits.shape
    return Rows(table_of(logits), num_indices, vocab, FilterParams(temperature, is_greedy, cutoff))


def softmax_partials(
    rows: Rows, *, block: int, num_warps: int, num_valid: Tensor | None = None
) -> Partials:
    """One launch, one program per chunk; no partials of window indices after `num_valid` `[B]`."""
    logits = rows.logits.data
    shape = *logits.shape[:2], triton.cdiv(rows.vocab, block)
    row_max = torch.empty(shape, dtype=torch.float32, device=logits.device)
    best = None
    if rows.params.is_greedy is not None:
        best = torch.empty(shape, dtype=torch.int32, device=logits.device)
    partials = Partials(row_max, torch.empty_like(row_max), best, shape[2])
    _partials_kernel[shape](
        rows, partials, num_valid, block=block, num_warps=num_warps, **NO_FUSION
    )
    return partials


@triton.jit
def _partials_kernel(rows, partials, num_valid, block: tl.constexpr):
    row, index, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    is_used = index >= 0
    if num_valid is not None:
        is_used = index <= tl.load(num_valid + row)
    if is_used:
        ids = chunk * block + tl.arange(0, block)
        x = read_logits(rows, row, index, ids)
        row_max = tl.max(x, axis=0)
        origin = tl.where(row_max == -INFINITY, 0.0, row_max)  # -inf - -inf would be NaN
        row_sum = tl.sum(tl.exp2((x - origin) * read_rate(rows, row)), axis=0)
        entry = (tl.cast(row, tl.int64) * rows.num_indices + index) * partials.num_chunks + chunk
        tl.store(partials.row_max + entry, row_max)
        tl.store(partials.row_sum + entry, row_sum)
        if rows.params.is_greedy is not None:
            best = tl.min(tl.where(x == row_max, ids, rows.vocab - 1), axis=0)
            tl.store(partials.best + entry, best)


@triton.jit
def row_start(table, row, index):
    """Pointer to the first entry of a row. In 64 bits: tables may have more than 2**31 entries."""
    row, index = tl.cast(row, tl.int64), tl.cast(index, tl.int64)
    return table.data + (row * table.row_stride + index * table.index_stride)


@triton.jit
def read_temperature(rows, row):
    """float32, 1 where no row has one."""
    temperature = tl.full((), 1.0, tl.float32)
    if rows.params.temperature is not None:
        temperature = tl.load(rows.params.temperature + row).to(tl.float32)
    return temperature


@triton.jit
def read_rate(rows, row):
    """The factor of unscaled logits in `exp2`: log2(e) / temperature."""
    return tl.div_rn(tl.full((), LOG2_E, tl.float32), read_temperature(rows, row))


@triton.jit
def read_logits(rows, row, index, ids):
    """float32 logits of tokens `ids`, unscaled; -inf for ids outside the vocabulary, and below the
    cutoff in rows that are not greedy.
    """
    is_token = (ids >= 0) & (ids < rows.vocab)
    x = tl.load(row_start(rows.logits, row, index) + ids, mask=is_token, other=-INFINITY)
    x = x.to(tl.float32)
    if rows.params.cutoff is not None:
        low, high, tie = _read_cutoff(rows, row, index)
        x = tl.where((x < low) | ((x <= high) & (ids < tie)), -INFINITY, x)
    return x


@triton.jit
def _read_cutoff(rows, row, index):
    """The least and the largest unscaled logit at a row's cutoff, and the id below which tokens of
    these logits are dropped. Greedy rows have no cutoff, nor have indices after the last.
    """
    params, entry, is_index = rows.params, row * rows.num_indices + index, index < rows.num_indices
    at = tl.load(params.cutoff.logits + entry, is_index, -INFINITY)
    tie = tl.load(params.cutoff.ids + entry, is_index, 0).to(tl.int32)
    if params.is_greedy is not None:
        is_greedy = tl.load(params.is_greedy + row)
        at, tie = tl.where(is_greedy, -INFINITY, at), tl.where(is_greedy, 0, tie)
    low, high = at, at
    if params.temperature is not None:
        low, high = _unscale(at, read_temperature(rows, row))
    return low, high, tie


@triton.jit
def _unscale(scaled, temperature):
    """The least and the largest float32 whose quotient by the temperature, rounded as in the
    definition, is `scaled`. So a cutoff is compared with logits as they are, without dividing each.

    Both lie within 8 floats of the product: its rounding and the quotient's move it by less.
    """
    below = to_key(scaled * temperature) - 8  # becomes the largest key whose quotient is less
    last = below  # becomes the largest key whose quotient is not more
    for bit in tl.static_range(4):
        step = 8 >> bit
        below += tl.where(tl.div_rn(from_key(below + step), temperature) < scaled, step, 0)
        last += tl.where(tl.div_rn(from_key(last + step), temperature) <= scaled, step, 0)
    low = tl.where(scaled == -INFINITY, scaled, from_key(below + 1))
    return low, from_key(last)


@triton.jit
def to_key(x):
    """int32 in the order of float32; both zeros are 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def from_key(key):
    """The float32 of a key."""
    value = tl.abs(key).to(tl.float32, bitcast=True)
    return tl.where(key < 0, -value, value)


@triton.jit
def merge_partials(rows, partials, row, index, last, padded_chunks: tl.constexpr):
    """The distributions of a row's window indices `[P]`, up to index `last`, from the partials of
    their chunks.

    Returns:
        A tuple for `read_probs`, `[P]` each: the largest logit; the sum of weights, NaN where the
        logits give no distribution and after `last`; and the token of a one-hot distribution, -1 of
        others.
    """
    chunk = tl.arange(0, padded_chunks)[None]
    entry = (tl.cast(row, tl.int64) * rows.num_indices + index)[:, None] * partials.num_chunks
    entry, is_chunk = entry + chunk, (chunk < partials.num_chunks) & (index <= last)[:, None]
    maxima = tl.load(partials.row_max + entry, is_chunk, -INFINITY)
    row_max = tl.max(maxima, axis=1)
    weights = tl.exp2((maxima - row_max[:, None]) * read_rate(rows, row))  # NaN if all are -inf
    row_sum = tl.sum(tl.load(partials.row_sum + entry, is_chunk, 0.0) * weights, axis=1)
    row_sum = tl.where(row_sum > 0, row_sum, float("nan"))
    one_hot = tl.full(row_max.shape, -1, tl.int32)
    if rows.params.is_greedy is not None:
        best = tl.load(partials.best + entry, is_chunk, 0)
        best = tl.min(tl.where(maxima == row_max[:, None], best, rows.vocab - 1), axis=1)
        one_hot = tl.where(tl.load(rows.params.is_greedy + row), best, -1)
    return row_max, row_sum, one_hot


@triton.jit
def chunk_probs(
    rows, partials, row, index, distribution, block: tl.constexpr, padded_chunks: tl.constexpr
):
    """The probabilities of a row's chunks, `[C]` float64, given its distribution. If the largest
    probability of a chunk rounds to 0, so that no token of it can be drawn, they are 0, too.
    """
    row_max, row_sum, one_hot = distribution
    chunk, entry = tl.arange(0, padded_chunks), tl.cast(row, tl.int64) * rows.num_indices + index
    entry, is_chunk = entry * partials.num_chunks + chunk, chunk < partials.num_chunks
    maxima = tl.load(partials.row_max + entry, is_chunk, -INFINITY)
    largest = tl.exp2((maxima - row_max) * read_rate(rows, row)) * tl.div_rn(1.0, row_sum)
    sums = tl.load(partials.row_sum + entry, is_chunk, 0.0)
    probs = tl.where(largest == 0, 0.0, sums * largest).to(tl.float64)
    if rows.params.is_greedy is not None:
        probs = tl.where(one_hot < 0, probs, (chunk == one_hot // block).to(tl.float64))
    return probs


@triton.jit
def read_probs(rows, row, index, distribution, ids):
    """Probabilities of tokens `ids`; a GPU flushes those below 2**-126 to 0. `distribution` is of
    `merge_partials`.
    """
    row_max, row_sum, one_hot = distribution
    weights = tl.exp2((read_logits(rows, row, index, ids) - row_max) * read_rate(rows, row))
    probs = weights * tl.div_rn(1.0, row_sum)
    if rows.params.is_greedy is not None:
        probs = tl.where(one_hot < 0, probs, tl.where(ids == one_hot, 1.0, 0.0))
    return probs


@triton.jit
def _first_of(rank, value, other_rank, other_value):
    is_first = rank <= other_rank
    return tl.where(is_first, rank, other_rank), tl.where(is_first, value, other_value)


@triton.jit
def find_past(weights, threshold, length: tl.constexpr):
    """The first index whose cumulative weight (float64) exceeds the threshold, never one of weight
    0, and the cumulative weight before it.

    Rounding may leave no such index: then the last index of positive weight is returned, or
    `length` if there is none.
    """
    index = tl.arange(0, length)
    is_positive = weights > 0  # a parallel prefix sum may grow over zeros
    sums = tl.cumsum(weights, axis=0)
    is_past = (sums > threshold) & is_positive
    rank = tl.where(is_past, index, tl.where(is_positive, 2 * length - index, 3 * length))
    best, before = tl.reduce((rank, sums - weights), 0, _first_of)
    found = tl.where(best < length, best, 2 * length - best)
    return tl.where(found < 0, length, found), before


@triton.jit
def find_past_in_chunk(weights, threshold, block: tl.constexpr):
    """`find_past` for float32 weights of a chunk: first the group of GROUP tokens, then the token.
    A prefix sum over the chunk in float64 would need four times as many registers.
    """
    size: tl.constexpr = GROUP if block > GROUP else block
    count: tl.constexpr = block // size
    groups = tl.reshape(weights, (count, size))
    group, before = find_past(tl.sum(groups, axis=1).to(tl.float64), threshold, count)
    group = tl.minimum(group, count - 1)
    is_group = tl.arange(0, count)[:, None] == group
    inside = tl.sum(tl.where(is_group, groups, 0.0), axis=0).to(tl.float64)
    offset, _ = find_past(inside, threshold - before, size)
    return group * size + offset
