"""`shift_window` on a GPU, in one launch: a program copies one block of one row's features.

Legend: B rows, N new tokens of a context, H remembered rows, W window, M later passes, F feature
width.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.types import PastRows, ShiftedWindow
from specdec.types import Context

BLOCK = 1024


class Source(NamedTuple):
    """Rows to copy from, as a kernel argument. Both tensors are contiguous."""

    tokens: Tensor  # [B, rows], or [B, 1 + rows] where the anchor comes first
    features: Tensor  # [B, rows, F]
    num_rows: int  # N or H
    has_anchor: int  # 1 where the anchor comes first


class Sizes(NamedTuple):
    """Numbers of a launch, as a kernel argument: W, W + M, F, and the trash slot."""

    width: int
    num_slots: int
    num_features: int
    trash: int


def shift_window(
    context: Context,
    past: PastRows,
    width: int,
    *,
    trash: int,
    num_later: int = 0,
    block: int = BLOCK,
) -> ShiftedWindow:
    """As the definition; a program copies `block` channels, a power of two."""
    features = context.features
    num_rows, num_columns, num_features = features.shape
    out = ShiftedWindow(
        tokens=context.tokens.new_empty(num_rows, width),
        features=features.new_empty(num_rows, width, num_features),
        slots=context.tokens.new_empty(num_rows, width + num_later),
    )
    new = Source(context.tokens.contiguous(), features.contiguous(), num_columns, 1)
    past_rows = past.tokens.shape[1]
    old = Source(past.tokens.contiguous(), past.features.contiguous(), past_rows, 0)
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
    at = row * (source.num_rows + source.has_anchor) + index + source.has_anchor
    token = tl.load(source.tokens + at, mask=is_there, other=0)
    at = (row * source.num_rows + index) * num_features + channels
    limit = tl.where(is_there, num_features, 0)
    return token, tl.load(source.features + at, mask=channels < limit, other=0)
