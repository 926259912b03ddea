"""Mask window: the rows of one pass of a parallel drafter, from ragged contexts. See README.md.

Legend: B rows, N new tokens of a context, R committed rows of a pass, M rows after them, K draft
tokens.
"""

import torch
from torch import Tensor

from specdec.kernels.types import MaskWindow, WindowSpec, suits_kernels


def expand_window(tokens: Tensor, start: Tensor, num_new: Tensor, spec: WindowSpec) -> MaskWindow:
    """Committed tokens and the masks after them, with their slots, in static shapes.

    Everything follows from one count per row, the committed rows `num_new + 1 - shift`: tokens that
    were rejected have no part in offsets, slots or totals. A row of which nothing was committed
    (count 0 or less) writes nothing and predicts nothing.

    Args:
        tokens: `[B, N + 1]` int64, the anchor and the new tokens; anything beyond a row's own.
        start: `[B]` int64, position of the anchor.
        num_new: `[B]` int64 in -1..N.
        spec: what the window is made of.

    Returns:
        `MaskWindow`; R + M columns, the worst case, whatever was accepted.

    Example:
        >>> spec = WindowSpec(1, 2, False, -1, 3, mask_token=9, max_positions=16, trash=16)
        >>> ids, start, num_new = torch.tensor([[5, 6, 7]]), torch.tensor([3]), torch.tensor([1])
        >>> window = expand_window(ids, start, num_new, spec)
        >>> window.tokens, window.slots
        (tensor([[6, 0, 9, 9]]), tensor([[ 3, 16,  4,  5]]))
        >>> window.sampled, window.num_valid
        (tensor([[0, 2, 3]]), tensor([3]))
    """
    if tokens.is_cuda and suits_kernels(tokens):
        from specdec.kernels.mask_window import triton

        return triton.expand_window(tokens, start, num_new, spec)
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
        slots=torch.where(is_written, positions, spec.trash),
        sampled=sampled,
        num_valid=num_valid,
        first_later=first_later,
    )
