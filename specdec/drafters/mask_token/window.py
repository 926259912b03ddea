"""`expand_window`: the rows of one pass of a parallel drafter, from ragged contexts.

Legend: B rows, N new tokens of a context, R committed rows of a pass, M rows after them, K draft
tokens.

A parallel drafter makes one pass over what a step has committed and over masks after it. Rows of a
batch accept different numbers of tokens, and a captured step has one shape. So a window has R + M
columns, the worst case. Everything follows from one count per row, its committed rows
`c = num_new + 1 - shift`:

| column | token | position | is written |
|---|---|---|---|
| j = 0..R-1 | token j + shift of the context | start + j | j < c |
| R + i, i = 0..M-1 | mask, or for i = 0 the last committed token | start + c + i | c > 0 |

The slot of a column is its position. It is the padding slot, which no query attends to, if the
column is not written or its position is `max_positions` or more. So rejected tokens are columns
j >= c: they have no slot and no part in offsets and counts. Positions are compared with the limit,
never reduced modulo it.

Row `first_row + i` after the committed ones predicts draft token i, at position
`start + c + first_row + i`. So `max_positions - (start + c + first_row)` draft tokens, at least 0
and at most K, are predicted by rows that are written: `num_valid`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class WindowSpec(NamedTuple):
    """What a window is made of: numbers of the host, the same for every row of a batch.

    Args:
        shift: 1: committed rows are the N new tokens, each one position before its own (where its
            feature is from). 0: they are the root and the new tokens, each at its own position.
        num_later: M.
        opens_with_last: the first of the M rows is the last committed token; the others are masks.
        first_row: which of the M rows predicts the first draft token, the next ones the next; -1
            is the last committed row.
        num_draft_tokens: K <= M - first_row.
        mask_token: id of the masks.
        max_positions: rows at this position and after are not written.
        padding_slot: the slot of rows that are not to be written.
    """

    shift: int
    num_later: int
    opens_with_last: bool
    first_row: int
    num_draft_tokens: int
    mask_token: int
    max_positions: int
    padding_slot: int


class MaskWindow(NamedTuple):
    """The rows of one pass. A row's slot is its position, unless it is the padding slot.

    Args:
        tokens: `[B, R + M]` int64; 0 for committed rows beyond a row's own.
        slots: `[B, R + M]` int64.
        sampled: `[B, K]` int64, index of the row that predicts each draft token.
        num_valid: `[B]` int64, how many of them are predicted by rows that are written.
        first_later: `[B]` int64, position of the first of the M rows.
    """

    tokens: Tensor
    slots: Tensor
    sampled: Tensor
    num_valid: Tensor
    first_later: Tensor


def expand_window(tokens: Tensor, start: Tensor, num_new: Tensor, spec: WindowSpec) -> MaskWindow:
    """Committed tokens and the masks after them, with their slots, in static shapes.

    A row without a committed row (`num_new + 1 - shift` is 0 or less) writes nothing and predicts
    nothing.

    Args:
        tokens: `[B, N + 1]` int64, the root and the new tokens; anything beyond a row's own.
        start: `[B]` int64, position of the root.
        num_new: `[B]` int64 in -1..N.
        spec: what the window is made of.

    Returns:
        `MaskWindow`; R + M columns, the worst case, whatever was accepted.

    Example:
        >>> spec = WindowSpec(1, 2, False, -1, 3, mask_token=9, max_positions=16, padding_slot=16)
        >>> ids, start, num_new = torch.tensor([[5, 6, 7]]), torch.tensor([3]), torch.tensor([1])
        >>> window = expand_window(ids, start, num_new, spec)
        >>> window.tokens, window.slots
        (tensor([[6, 0, 9, 9]]), tensor([[ 3, 16,  4,  5]]))
        >>> window.sampled, window.num_valid
        (tensor([[0, 2, 3]]), tensor([3]))
    """
    device, rows = tokens.device, len(tokens)
    counts = num_new + 1 - spec.shift  # [B]
    committed = tokens[:, spec.shift :]
    columns = torch.arange(committed.shape[1], device=device)  # [R]
    is_real = columns < counts[:, None]
    later = torch.arange(spec.num_later, device=device)  # [M]
    first_later = start + counts
    masks = torch.full((rows, spec.num_later), spec.mask_token, device=device)
    if spec.opens_with_last:
        last = tokens.gather(1, num_new.clamp(min=0)[:, None])
        masks = torch.cat([last, masks[:, 1:]], dim=1) if spec.num_later else masks
    has_any = counts[:, None] > 0
    positions = torch.cat([start[:, None] + columns, first_later[:, None] + later], dim=1)
    is_written = torch.cat([is_real, has_any.expand(-1, spec.num_later)], dim=1)
    is_written = is_written & (positions < spec.max_positions)

    index = spec.first_row + torch.arange(spec.num_draft_tokens, device=device)  # [K]
    last_committed = (counts - 1).clamp(min=0)[:, None]
    sampled = torch.where(index < 0, last_committed, committed.shape[1] + index)
    room = spec.max_positions - (first_later + spec.first_row)
    num_valid = torch.where(counts > 0, room.clamp(0, spec.num_draft_tokens), 0)
    return MaskWindow(
        tokens=torch.cat([torch.where(is_real, committed, 0), masks], dim=1),
        slots=torch.where(is_written, positions, spec.padding_slot),
        sampled=sampled,
        num_valid=num_valid,
        first_later=first_later,
    )
