"""`mtp_shift` on a GPU, in one launch: a program copies one block of one row's features.

Legend: B rows, N new tokens of a context, H remembered rows, W window, M later passes, F feature
width.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specdec.kernels.mtp_shift.reference import PastRows, ShiftedWindow, check_widths
from specdec.kernels.triton_common import Table, table_of
from specdec.types import Context

BLOCK = 1024


class Source(NamedTuple):
    """Rows to copy from, as a kernel argument.

    Args:
        tokens: `[B, rows]`.
        features: `[B, rows, F]`.
        num_rows: N or H.
    """

    tokens: Table
    features: Table
    num_rows: int


class Sizes(NamedTuple):
    """Numbers of a launch, as a kernel argument: W, W + M, F, and the trash slot."""

    width: int
    num_slots: int
    num_features: int
    trash: int


def mtp_shift(
    context: Context,
    past: PastRows,
    width: int,
    *,
    trash: int,
    num_later: int = 0,
    block: int = BLOCK,
) -> ShiftedWindow:
    """As `reference.mtp_shift`; a program copies `block` channels, a power of two."""
    check_widths(context, past, width)
    features = context.features
    num_rows, num_columns, num_features = features.shape
    out = ShiftedWindow(
        tokens=context.tokens.new_empty(num_rows, width),
        features=features.new_empty(num_rows, width, num_features),
        slots=context.tokens.new_empty(num_rows, width + num_later),
    )
    new = Source(table_of(context.tokens[:, 1:]), table_of(features), num_columns)
    old = Source(table_of(past.tokens), table_of(past.features), past.tokens.shape[1])
    sizes = Sizes(width, width + num_later, num_features, trash)
    grid = num_rows, width + num_later, max(1, triton.cdiv(num_features, block))
    if not out.slots.numel():
        return out
    with torch.cuda.device_of(features):
        starts = context.start.contiguous(), context.num_new.contiguous()
        _shift_kernel[grid](new, old, *starts, out, sizes, block=block)
    return out


@triton.jit
def _shift_kernel(
    new,  # Source: rows of the context; those at or beyond num_new are not read
    old,  # Source: remembered rows, which end at the anchor
    start,  # [B] position of the anchor
    num_new,  # [B] new rows of each text; 0 or less for none
    out,  # ShiftedWindow: tokens, features, slots; written in full
    sizes,  # Sizes
    block: tl.constexpr,
):
    row, column, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.minimum(tl.maximum(tl.load(num_new + row), 0), new.num_rows)  # the one clamp
    index = count + column - sizes.width  # among the new rows; negative among the remembered
    slot = tl.load(start + row) + index
    is_row = (index >= -old.num_rows) & (slot >= 0)
    if chunk == 0:
        entry = tl.cast(row, tl.int64) * sizes.num_slots + column
        tl.store(out.slots + entry, tl.where(is_row & (count > 0), slot, sizes.trash))
    if column < sizes.width:
        is_new, is_old = is_row & (index >= 0), is_row & (index < 0)
        channels = chunk * block + tl.arange(0, block)
        width = sizes.num_features
        token, x = _read(new, row, index, channels, is_new, width)
        other_token, other_x = _read(old, row, index + old.num_rows, channels, is_old, width)
        entry = tl.cast(row, tl.int64) * sizes.width + column
        if chunk == 0:
            tl.store(out.tokens + entry, tl.where(is_new, token, other_token))
        there = out.features + entry * width + channels
        tl.store(there, tl.where(is_new, x, other_x), mask=channels < width)


@triton.jit
def _read(source, row, index, channels, is_there, num_features):
    """Token and features of a source's row `index`; zeros where `is_there` is false."""
    row, index = tl.cast(row, tl.int64), tl.cast(index, tl.int64)
    tokens, features = source.tokens, source.features
    at = row * tokens.row_stride + index * tokens.index_stride
    token = tl.load(tokens.data + at, mask=is_there, other=0)
    at = row * features.row_stride + index * features.index_stride + channels
    limit = tl.where(is_there, num_features, 0)
    return token, tl.load(features.data + at, mask=channels < limit, other=0)
