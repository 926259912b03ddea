"""`ragged_attention` on a GPU, in one launch or two: every program attends over one share of a
row's slots; where rows are split into several shares, a second launch merges them.

Legend: B rows, N queries per row, S slots, Hq query heads, Hkv key and value heads, D width of
keys, Dv width of values, C splits of a row.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_common import INFINITY, LOG2_E, States, Table, states_of, table_of
from specdec.kernels.types import CAUSAL, AttentionOptions

TILE_BYTES = 32 * 1024  # of keys and values
PROGRAMS_PER_PROCESSOR = 2  # which fit: three stages of a loop keep two tiles in shared memory
FUSION = {"enable_fp_fusion": True}
"""Option of a launch: multiply-add may be fused. No two launches need the same bits here."""


class Tiles(NamedTuple):
    """How the work is cut."""

    block_slots: int  # of a tile, a power of two from 16
    block_rows: int  # query rows of a tile, a power of two from 16
    num_warps: int  # of a program
    num_stages: int
    num_splits: int  # C


class Partials(NamedTuple):
    """What each split of a row found. Splits without slots are not written, but for the first."""

    out: Tensor  # [B, Hq, N, C, Dv] float32, sums of weighted values
    row_max: Tensor  # [B, Hq, N, C] float32, the largest score times log2(e)
    row_sum: Tensor  # [B, Hq, N, C] float32, the sum of weights, relative to row_max


class Arguments(NamedTuple):
    """All arguments of both launches but the sizes of tiles; what is `None` is compiled away."""

    query: States
    key: States
    value: States
    slots: Table  # [B, N] int64
    visible: Table | None  # [B, N, M] bool
    positions: Table | None  # [B, N] int64
    sinks: Tensor | None  # [Hq]
    out: Tensor  # [B, N, Hq, Dv], contiguous
    partials: Partials | None
    scale: float  # of the scores
    softcap: float | None
    sliding_window: int | None
    num_first: int | None
    num_queries: int
    num_visible: int  # M
    num_slots: int
    num_kv_heads: int  # Hkv
    group: int  # Hq / Hkv
    num_splits: int


def ragged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    options: AttentionOptions = CAUSAL,
    *,
    tiles: Tiles | None = None,
) -> Tensor:
    """As the definition; `tiles` replaces the default cut."""
    rows, num_heads, num_queries, width = query.shape
    value_width = values.shape[3]
    out = query.new_empty(rows, num_queries, num_heads, value_width)
    if not out.numel():
        return out
    tiles = tiles or default_tiles(query, keys, values)
    arguments = _arguments(query, keys, values, slots, options, out, tiles.num_splits)
    padded = {
        "padded_queries": triton.next_power_of_2(num_queries),
        "value_width": value_width,
        "padded_value_width": max(16, triton.next_power_of_2(value_width)),
    }
    num_tiles = triton.cdiv(num_queries * arguments.group, tiles.block_rows)
    grid = rows * tiles.num_splits * num_tiles * arguments.num_kv_heads
    with torch.cuda.device_of(query):
        _attend_kernel[(grid,)](
            arguments,
            num_tiles,
            **_cut_width(width),
            **padded,
            block_rows=tiles.block_rows,
            block_slots=tiles.block_slots,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            **FUSION,
        )
        if tiles.num_splits > 1:
            _merge_kernel[(rows * num_heads * num_queries,)](
                arguments, **padded, block_slots=tiles.block_slots, **FUSION
            )
    return out


def default_tiles(query: Tensor, keys: Tensor, values: Tensor) -> Tiles:
    """The cut for the sizes of `ragged_attention`'s arguments; it depends on no number on a device.

    There are as many splits as fill the GPU once, so no program starts late because another has
    not ended.
    """
    group = query.shape[1] // keys.shape[1]
    slot_bytes = (keys.shape[3] + values.shape[3]) * keys.element_size()
    block_slots = min(max(_power_of_2_in(TILE_BYTES // slot_bytes), 16), 128)
    # Sums of weighted values and operands stay in registers: at most 8192 sums, 128 bytes a row.
    most_rows = 8192 // triton.next_power_of_2(values.shape[3])
    most_rows = max(min(most_rows, 128 // keys.element_size()), 16)
    num_rows = query.shape[2] * group
    block_rows = min(max(triton.next_power_of_2(num_rows), 16), most_rows)
    num_programs = len(query) * keys.shape[1] * triton.cdiv(num_rows, block_rows)
    wanted = PROGRAMS_PER_PROCESSOR * num_processors(query.device) // num_programs
    num_splits = min(max(wanted, 1), triton.cdiv(keys.shape[2], block_slots))
    num_warps = 4 if block_rows == 16 else 8  # with 4 a thread of a larger tile spills registers
    return Tiles(block_slots, block_rows, num_warps, num_stages=3, num_splits=num_splits)


@lru_cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; those of an H200 where there is none."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def _power_of_2_in(count: int) -> int:
    """The largest power of two that is at most `count` >= 1."""
    return 1 << (max(count, 1).bit_length() - 1)


def _cut_width(width: int) -> dict[str, int]:
    """A width as a power of two and what is left of it: tiles have powers of two, and 192 or 576
    padded to the next one would be read in tiles of twice their bytes.
    """
    head = max(_power_of_2_in(width), 16)
    tail = max(width - head, 0)
    padded_tail = max(16, triton.next_power_of_2(tail)) if tail else 0
    return {"width": width, "head_width": head, "tail_width": padded_tail}


def _arguments(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    options: AttentionOptions,
    out: Tensor,
    num_splits: int,
) -> Arguments:
    """The kernels' arguments, with memory for partials if rows are split."""
    rows, num_heads, num_queries, width = query.shape
    partials, shape = None, (rows, num_heads, num_queries, num_splits)
    if num_splits > 1:
        where = {"dtype": torch.float32, "device": query.device}
        sums = torch.empty(*shape, values.shape[3], **where)
        partials = Partials(sums, torch.empty(shape, **where), torch.empty(shape, **where))
    visible = options.window_visible
    return Arguments(
        *map(states_of, (query, keys, values)),
        slots=table_of(slots),
        visible=None if visible is None else table_of(visible),
        positions=None if options.positions is None else table_of(options.positions),
        sinks=None if options.sinks is None else options.sinks.contiguous(),
        out=out,
        partials=partials,
        scale=float(width**-0.5 if options.scale is None else options.scale),
        softcap=None if options.softcap is None else float(options.softcap),
        sliding_window=options.sliding_window,
        num_first=None if options.sliding_window is None else options.num_first,
        num_queries=num_queries,
        num_visible=0 if visible is None else visible.shape[2],
        num_slots=keys.shape[2],
        num_kv_heads=keys.shape[1],
        group=num_heads // keys.shape[1],
        num_splits=num_splits,
    )


@triton.jit
def _span(a, row, padded_queries: tl.constexpr, block_slots: tl.constexpr):
    """The smallest slot that a row's window has a mask for, and the slots from `begin` to `end`
    that its queries see; where first slots are seen too, the places of `_slot_of`.
    """
    index = tl.arange(0, padded_queries)
    slot = _query_slots(a, row, index)
    first = tl.min(tl.where(slot >= 0, slot, a.num_slots), axis=0)
    end = tl.max(slot, axis=0) + 1
    begin = end * 0
    if a.sliding_window is not None:
        lowest = tl.min(tl.where(slot >= 0, _positions(a, row, index, slot), a.num_slots), axis=0)
        reach = tl.maximum(a.sliding_window - 1, 0)  # the window's own slots may have a mask
        begin = tl.minimum(tl.maximum(lowest - reach, 0), end)
    if a.visible is not None:
        first = first - (a.num_visible - a.num_queries)
        begin = tl.minimum(begin, tl.maximum(first, 0))
    if a.num_first is not None:
        begin = tl.maximum(begin - _lead(a, block_slots), 0)
    return first, begin, end


@triton.jit
def _lead(a, block_slots: tl.constexpr):
    """Slots of the tiles that hold the first slots."""
    return (a.num_first + block_slots - 1) // block_slots * block_slots


@triton.jit
def _slot_of(a, place, begin, block_slots: tl.constexpr):
    """The first slot of a tile, given its place: tiles of first slots stand right before those of
    the sliding window, so both are shared out as one.
    """
    slot = place
    if a.num_first is not None:
        slot = tl.where(place < begin + _lead(a, block_slots), place - begin, place)
    return slot


@triton.jit
def _positions(a, row, index, slot):
    """int32 positions of a row's queries, given their slots."""
    position = slot
    if a.positions is not None:
        at = tl.cast(row, tl.int64) * a.positions.row_stride + index * a.positions.index_stride
        position = tl.load(a.positions.data + at, index < a.num_queries, 0).to(tl.int32)
    return position


@triton.jit
def _query_slots(a, row, index):
    """int32 slots of a row's queries; -1 for those to forget and for indices after the last."""
    at = tl.cast(row, tl.int64) * a.slots.row_stride + index * a.slots.index_stride
    slot = tl.load(a.slots.data + at, index < a.num_queries, a.num_slots)
    return tl.where(slot < a.num_slots, slot, -1).to(tl.int32)


@triton.jit
def _share(a, begin, end, block_slots: tl.constexpr):
    """Slots of each split, whole tiles: a split after the last slot has none."""
    each = (end - begin + a.num_splits - 1) // a.num_splits
    return tl.maximum((each + block_slots - 1) // block_slots, 1) * block_slots


@triton.jit
def _start_of(states, row, head):
    """Pointer to a row's head."""
    row, head = tl.cast(row, tl.int64), tl.cast(head, tl.int64)
    return states.data + (row * states.row_stride + head * states.head_stride)


@triton.jit
def _rows_from(start, states, slot, local):
    """The states of a tile that begins at a slot: a pointer, and offsets `[slots]` from it."""
    return start + tl.cast(slot, tl.int64) * states.index_stride, local * states.index_stride


@triton.jit
def _load_columns(
    start, offsets, is_row, first: tl.constexpr, count: tl.constexpr, width: tl.constexpr
):
    """`[rows, count]`: columns from `first` on of the rows at given offsets; 0 past `width`."""
    column = first + tl.arange(0, count)
    is_entry = is_row[:, None]
    if first + count > width:
        is_entry = is_entry & (column < width)[None]
    return tl.load(start + (offsets[:, None] + column[None]), is_entry, 0.0)


@triton.jit
def _in_powers_of_two(a, products):
    """Scores times log2(e), of the products of queries and keys: scaled, and capped to
    `softcap * tanh(scores / softcap)`.
    """
    if a.softcap is None:
        scores = products * (a.scale * LOG2_E)
    else:
        ratio = products * a.scale / a.softcap
        decay = tl.exp(-2.0 * tl.abs(ratio))
        tanh = (1.0 - decay) / (1.0 + decay)
        tanh = tl.where(ratio < 0, -tanh, tanh)
        # By its series where 1 - decay would have few digits: most scores are far below the cap.
        square = ratio * ratio
        series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315)))
        tanh = tl.where(square < 0.04, ratio * series, tanh)
        scores = tanh * (a.softcap * LOG2_E)
    return scores


@triton.jit
def _is_visible(a, row, index, query_slot, position, start, first, block_slots: tl.constexpr):
    """`[rows, slots]`: what queries at given slots and positions see of a tile."""
    slot = start + tl.arange(0, block_slots)
    seen = slot[None] <= query_slot[:, None]
    if a.sliding_window is not None:
        near = slot[None] > position[:, None] - a.sliding_window
        if a.num_first is not None:
            near |= (slot < a.num_first)[None]
        seen &= near
    if a.visible is not None:  # noqa: SIM102  the compiler decides one, the program the other
        if start + block_slots > first:  # few tiles have slots of the window
            offset = slot - first
            is_own = (query_slot >= 0)[:, None] & ((offset >= 0) & (offset < a.num_visible))[None]
            at = tl.cast(row, tl.int64) * a.visible.row_stride + index * a.visible.index_stride
            own = tl.load(a.visible.data + (at[:, None] + offset[None]), is_own, 0) != 0
            seen = tl.where((offset >= 0)[None], own, seen)
    return seen


@triton.jit
def _attend_kernel(
    a,
    num_tiles,
    width: tl.constexpr,
    head_width: tl.constexpr,
    tail_width: tl.constexpr,
    padded_queries: tl.constexpr,
    value_width: tl.constexpr,
    padded_value_width: tl.constexpr,
    block_rows: tl.constexpr,
    block_slots: tl.constexpr,
):
    """One program per row of the batch, split, tile of query rows, and head of keys, the last
    fastest: programs that run together read neighbouring memory.
    """
    kv_head, place = tl.program_id(0) % a.num_kv_heads, tl.program_id(0) // a.num_kv_heads
    tile, place = place % num_tiles, place // num_tiles
    split, row = place % a.num_splits, place // a.num_splits
    first, begin, end = _span(a, row, padded_queries, block_slots)
    share = _share(a, begin, end, block_slots)
    start = begin + split * share
    if (split == 0) | (start < end):
        stop = tl.minimum(start + share, end)
        query_row = tile * block_rows + tl.arange(0, block_rows)
        index, head = query_row // a.group, kv_head * a.group + query_row % a.group
        query_slot = _query_slots(a, row, index)
        at = head.to(tl.int64) * a.query.head_stride + index * a.query.index_stride
        queries, is_row = _start_of(a.query, row, 0), index < a.num_queries
        query = _load_columns(queries, at, is_row, 0, head_width, width)
        if tail_width > 0:
            query_tail = _load_columns(queries, at, is_row, head_width, tail_width, width)
        keys, values = _start_of(a.key, row, kv_head), _start_of(a.value, row, kv_head)
        row_max = tl.full((block_rows,), -INFINITY, tl.float32)
        row_sum = tl.zeros((block_rows,), tl.float32)
        if a.sinks is not None:  # a score of the first split that has no value
            sink = tl.load(a.sinks + head, is_row, 0.0).to(tl.float32) * LOG2_E
            row_max = tl.where(split == 0, sink, row_max)
            row_sum += tl.where(split == 0, 1.0, 0.0)
        out = tl.zeros((block_rows, padded_value_width), tl.float32)
        position = _positions(a, row, index, query_slot)
        local = tl.arange(0, block_slots)
        for place in range(start, stop, block_slots):
            is_slot, slot = place + local < stop, _slot_of(a, place, begin, block_slots)
            here, offsets = _rows_from(keys, a.key, slot, local)
            key = _load_columns(here, offsets, is_slot, 0, head_width, width)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee")
            if tail_width > 0:
                key_tail = _load_columns(here, offsets, is_slot, head_width, tail_width, width)
                scores = tl.dot(query_tail, tl.trans(key_tail), scores, input_precision="ieee")
            scores = _in_powers_of_two(a, scores)
            seen = _is_visible(a, row, index, query_slot, position, slot, first, block_slots)
            scores = tl.where(seen & is_slot[None], scores, -INFINITY)
            new_max = tl.maximum(row_max, tl.max(scores, axis=1))
            origin = tl.where(new_max == -INFINITY, 0.0, new_max)  # -inf - -inf would be NaN
            weights = tl.exp2(scores - origin[:, None])
            decay = tl.exp2(row_max - origin)
            row_sum = row_sum * decay + tl.sum(weights, axis=1)
            here, offsets = _rows_from(values, a.value, slot, local)
            value = _load_columns(here, offsets, is_slot, 0, padded_value_width, value_width)
            out = out * decay[:, None]
            out = tl.dot(weights.to(value.dtype), value, out, input_precision="ieee")
            row_max = new_max
        num_heads = a.num_kv_heads * a.group
        column = tl.arange(0, padded_value_width)[None]
        is_entry = is_row[:, None] & (column < value_width)
        if a.partials is None:
            out = out / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
            entry = (tl.cast(row, tl.int64) * a.num_queries + index) * num_heads + head
            at = entry[:, None] * value_width + column
            tl.store(a.out + at, out.to(a.out.dtype.element_ty), is_entry)
        else:
            entry = (tl.cast(row, tl.int64) * num_heads + head) * a.num_queries + index
            entry = entry * a.num_splits + split
            tl.store(a.partials.out + entry[:, None] * value_width + column, out, is_entry)
            tl.store(a.partials.row_max + entry, row_max, is_row)
            tl.store(a.partials.row_sum + entry, row_sum, is_row)


@triton.jit
def _merge_kernel(
    a,
    padded_queries: tl.constexpr,
    value_width: tl.constexpr,
    padded_value_width: tl.constexpr,
    block_slots: tl.constexpr,
):
    """One program per query and head: merges the partials of the splits that had slots."""
    entry, num_heads = tl.program_id(0), a.num_kv_heads * a.group
    index, place = entry % a.num_queries, entry // a.num_queries
    head, row = place % num_heads, place // num_heads
    _, begin, end = _span(a, row, padded_queries, block_slots)
    share = _share(a, begin, end, block_slots)
    used = tl.maximum((end - begin + share - 1) // share, 1)
    row_max = tl.full((), -INFINITY, tl.float32)
    row_sum = tl.zeros((), tl.float32)
    column, local = tl.arange(0, padded_value_width), tl.arange(0, 16)
    out = tl.zeros((padded_value_width,), tl.float32)
    for split in range(0, used, 16):
        is_split = split + local < used
        at = tl.cast(entry, tl.int64) * a.num_splits + split + local
        maxima = tl.load(a.partials.row_max + at, is_split, -INFINITY)
        new_max = tl.maximum(row_max, tl.max(maxima, axis=0))
        origin = tl.where(new_max == -INFINITY, 0.0, new_max)
        weights, decay = tl.exp2(maxima - origin), tl.exp2(row_max - origin)
        sums = tl.load(a.partials.row_sum + at, is_split, 0.0)
        row_sum = row_sum * decay + tl.sum(sums * weights, axis=0)
        is_entry = is_split[:, None] & (column < value_width)[None]
        values = tl.load(a.partials.out + at[:, None] * value_width + column, is_entry, 0.0)
        out = out * decay + tl.sum(values * weights[:, None], axis=0)
        row_max = new_max
    out = out / tl.where(row_sum == 0, 1.0, row_sum)
    at = (tl.cast(row, tl.int64) * a.num_queries + index) * num_heads + head
    pointers = a.out + at * value_width + column
    tl.store(pointers, out.to(a.out.dtype.element_ty), column < value_width)
