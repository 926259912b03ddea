"""`write_slots` on a GPU, in one launch: one program per row, token and head."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_common import States, Table, states_of, table_of


class Copy(NamedTuple):
    """What is copied where."""

    source: States
    target: States


class Arguments(NamedTuple):
    """Of the kernel, whose `num_slots` is S."""

    key: Copy
    value: Copy
    slots: Table
    num_slots: int
    num_heads: int
    num_queries: int


def write_slots(
    keys: Tensor, values: Tensor, key_states: Tensor, value_states: Tensor, slots: Tensor
) -> None:
    """As the definition; a slot outside the cache is not written."""
    rows, num_heads, count, width = key_states.shape
    if not slots.numel():
        return
    copies = (
        Copy(states_of(source), states_of(target.transpose(1, 2)))
        for source, target in ((key_states, keys), (value_states, values))
    )
    arguments = Arguments(*copies, table_of(slots), keys.shape[1], num_heads, count)
    with torch.cuda.device_of(keys):
        _write_kernel[(rows * count * num_heads,)](
            arguments,
            width=width,
            padded_width=triton.next_power_of_2(max(width, 1)),
            value_width=value_states.shape[3],
            padded_value_width=triton.next_power_of_2(max(value_states.shape[3], 1)),
            num_warps=1,
        )


@triton.jit
def _start_of(states, row, head, index):
    """Pointer to the numbers of one head of a token."""
    row, head, index = tl.cast(row, tl.int64), tl.cast(head, tl.int64), tl.cast(index, tl.int64)
    at = row * states.row_stride + head * states.head_stride + index * states.index_stride
    return states.data + at


@triton.jit
def _copy(copy, row, head, index, slot, is_slot, width: tl.constexpr, padded: tl.constexpr):
    column = tl.arange(0, padded)
    is_entry = column < tl.where(is_slot, width, 0)
    numbers = tl.load(_start_of(copy.source, row, head, index) + column, is_entry, 0.0)
    tl.store(_start_of(copy.target, row, head, slot) + column, numbers, is_entry)


@triton.jit
def _write_kernel(
    a,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    value_width: tl.constexpr,
    padded_value_width: tl.constexpr,
):
    head, place = tl.program_id(0) % a.num_heads, tl.program_id(0) // a.num_heads
    index, row = place % a.num_queries, place // a.num_queries
    at = tl.cast(row, tl.int64) * a.slots.row_stride + index * a.slots.index_stride
    slot = tl.load(a.slots.data + at)
    is_slot = (slot >= 0) & (slot < a.num_slots)
    _copy(a.key, row, head, index, slot, is_slot, width, padded_width)
    _copy(a.value, row, head, index, slot, is_slot, value_width, padded_value_width)
