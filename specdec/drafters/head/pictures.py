"""What a head keeps of prompts with pictures, beside keys and values: where its rows are.

Elsewhere row t of a text is in slot t of the head's cache, and is turned to position t. A head that
does not see tokens of pictures has no slots for them. One of three axes turns rows at pictures by
three positions, and those after them by the text's own position, which is not the slot.

Legend: B rows, N tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.drafters.head.window import ContextRows
from specdec.graphs.tree import shared

if TYPE_CHECKING:
    from specdec.targets.prompt_inputs import PromptChunk


@dataclass(frozen=True, eq=False)
class PlacedRows:
    """Of a batch; all zeros for text.

    Args:
        left_out: `[B]` int64, tokens of pictures before the row's next one, which have no slots.
        ahead: `[B]` int64, the rotary position of a row after the prompt, less its slot.
        sees_pictures: rows beside tokens of pictures are read.
        axes: of the head's rope, see `axes_of`; `None` where a position is one number.
    """

    left_out: Tensor
    ahead: Tensor
    sees_pictures: bool = shared()
    axes: Tensor | None = shared()

    def place(self, rows: ContextRows, chunk: PromptChunk | None) -> ContextRows:
        """The rows of a context at their slots; those of a chunk of a prompt with pictures are
        counted.
        """
        if chunk is not None:
            return self._place_prompt(rows, chunk)
        is_real = rows.slots != rows.padding_slot
        slots = torch.where(is_real, rows.slots - self.left_out[:, None], rows.slots)
        next_slots = rows.next_slots - self.left_out
        return replace(rows, slots=slots, next_slots=next_slots, ahead=self.ahead)

    def _place_prompt(self, rows: ContextRows, chunk: PromptChunk) -> ContextRows:
        inputs, slots, (count, width) = chunk.inputs, rows.slots, rows.slots.shape
        is_real, offset = slots != rows.padding_slot, torch.zeros_like(self.ahead)
        order = chunk.start + torch.arange(width, device=slots.device)
        positions = order.expand(count, -1)
        if not self.sees_pictures:
            is_hidden = _columns(inputs.is_given, chunk.start + 1, width) & is_real
            before = self.left_out[:, None] + is_hidden.cumsum(1) - is_hidden.long()
            slots = torch.where(is_real & ~is_hidden, slots - before, rows.padding_slot)
            self.left_out.add_(is_hidden.sum(dim=1))
        if self.axes is not None:
            offset = inputs.position_offset
            if inputs.position_ids is not None:
                positions = of_three_axes(_columns(inputs.position_ids, chunk.start, width))
        self.ahead.copy_(self.left_out + offset)
        next_slots = rows.next_slots - self.left_out
        moved = {"slots": slots, "next_slots": next_slots, "ahead": self.ahead}
        return replace(rows, **moved, positions=positions)


def placed_rows(
    batch_size: int, *, sees_pictures: bool, axes: Tensor | None, device: torch.device
) -> PlacedRows | None:
    """Of text; `None` for a head that reads pictures as it reads text."""
    if sees_pictures and axes is None:
        return None
    zeros = (torch.zeros(batch_size, dtype=torch.long, device=device) for _ in range(2))
    return PlacedRows(*zeros, sees_pictures, None if axes is None else axes.to(device))


def of_three_axes(positions: Tensor) -> Tensor:
    """`[3, B, N]` of HF's `[4, B, N]`, whose first axis is the text's; others as they are."""
    return positions[-3:] if positions.dim() == 3 else positions


def _columns(table: Tensor, start: int, count: int) -> Tensor:
    """So many columns of the last dimension, zeros where there are no more."""
    found = table[..., start : start + count]
    return F.pad(found, (0, count - found.shape[-1]))
