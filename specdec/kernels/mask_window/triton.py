"""`expand_window` on a GPU, in one launch: one program per row.

Legend: B rows, R committed rows of a pass, M rows after them, K draft tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.types import MaskWindow, WindowSpec


def expand_window(tokens: Tensor, start: Tensor, num_new: Tensor, spec: WindowSpec) -> MaskWindow:
    """As the definition."""
    rows, num_committed = len(tokens), tokens.shape[1] - spec.shift
    width, count = num_committed + spec.num_later, spec.num_draft_tokens
    shapes = (rows, width), (rows, width), (rows, count), (rows,), (rows,)
    window = MaskWindow(
        *(torch.empty(shape, dtype=torch.long, device=tokens.device) for shape in shapes)
    )
    if rows == 0:
        return window
    tokens, start, num_new = (t.contiguous() for t in (tokens, start, num_new))
    with torch.cuda.device_of(tokens):
        _expand_kernel[(rows,)](
            tokens,
            start,
            num_new,
            window,
            spec.max_positions,
            spec.trash,
            spec.mask_token,
            num_committed,
            width,
            shift=spec.shift,
            opens_with_last=spec.opens_with_last,
            first_row=spec.first_row,
            num_draft_tokens=count,
            block=triton.next_power_of_2(max(width, 1)),
            padded_drafts=triton.next_power_of_2(max(count, 1)),
        )
    return window


@triton.jit
def _expand_kernel(
    tokens,
    start,
    num_new,
    window,
    max_positions,
    trash,
    mask_token,
    num_committed,
    width,
    shift: tl.constexpr,
    opens_with_last: tl.constexpr,
    first_row: tl.constexpr,
    num_draft_tokens: tl.constexpr,
    block: tl.constexpr,
    padded_drafts: tl.constexpr,
):
    row = tl.program_id(0)
    first, new = tl.load(start + row), tl.load(num_new + row)
    count = new + (1 - shift)
    first_later = first + count
    source = tokens + tl.cast(row, tl.int64) * (num_committed + shift)

    column = tl.arange(0, block)
    is_later, later = column >= num_committed, column - num_committed
    is_real = (column < count) & (column < num_committed)
    token = tl.load(source + shift + column, mask=is_real, other=0)
    token = tl.where(is_later, tl.cast(mask_token, tl.int64), token)
    if opens_with_last:
        last = tl.load(source + tl.maximum(new, 0))
        token = tl.where(later == 0, last, token)
    position = tl.where(is_later, first_later + later, first + column)
    is_written = (is_real | (is_later & (count > 0))) & (position < max_positions)
    slot = tl.where(is_written, position, tl.cast(trash, tl.int64))
    out = tl.cast(row, tl.int64) * width + column
    tl.store(window.tokens + out, token, mask=column < width)
    tl.store(window.slots + out, slot, mask=column < width)

    draft = tl.arange(0, padded_drafts)
    index = first_row + draft
    last_committed = tl.maximum(count - 1, 0)
    sampled = tl.where(index < 0, last_committed, tl.cast(num_committed + index, tl.int64))
    entry = tl.cast(row, tl.int64) * num_draft_tokens + draft
    tl.store(window.sampled + entry, sampled, mask=draft < num_draft_tokens)
    room = tl.cast(max_positions, tl.int64) - (first_later + first_row)
    num_valid = tl.minimum(tl.maximum(room, 0), num_draft_tokens)
    tl.store(window.num_valid + row, tl.where(count > 0, num_valid, 0))
    tl.store(window.first_later + row, first_later)
