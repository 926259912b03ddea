"""`TargetText`: what a target has of the text so far, for drafters that read it (`reads_target`).

Legend: B rows, N tokens, S slots, d width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.arguments import check_integer
from specdec.slots.cache import SlotCache, Window
from specdec.targets.slot_model import SlotModel
from specdec.targets.target import Target

if TYPE_CHECKING:
    from specdec.slots.spans import Chunk


@dataclass(frozen=True, eq=False)
class TargetText:
    """The keys and values that a target has of the text of each row: to be read, and written to
    behind the text only.

    Args:
        target: whose they are.
        cache: where they are; token t of a row is in slot t.
        lengths: `[B]` int64, tokens of each row that the target has read: the slot of the root of
            its next step. What is at or beyond it is garbage.
        room: tokens that may be run behind the text: K + 1, and the drafter's `extra_slots`; `None`
            where nobody counts.
        row_inputs: other ones than the cache's.
    """

    target: Target
    cache: SlotCache
    lengths: Tensor
    _: KW_ONLY
    room: int | None = None
    row_inputs: Mapping[str, Tensor] | None = None

    @property
    def positions(self) -> Tensor:
        """`[B]`, where the root of each row stands in its text."""
        offset = self._inputs.get("position_offset")
        return self.lengths if offset is None else self.lengths + offset

    @property
    def _inputs(self) -> Mapping[str, Tensor]:
        return self.cache.row_inputs if self.row_inputs is None else self.row_inputs

    def over(self, table: SlotCache, lengths: Tensor) -> TargetText:
        """The text as far as a table shows it: its last token before the root is the last of
        `lengths` `[B]` tokens there, and what follows goes on from its own position.
        """
        own = {**self._inputs, "position_offset": self.positions - lengths}
        return replace(self, cache=table, lengths=lengths, row_inputs=own)

    def window_of(self, layer: int) -> int | Chunk | None:
        """How much of the text a layer sees: its sliding window in positions or its `Chunk`, `None`
        for all.
        """
        return self.target.layer_windows.get(layer)

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys `[B, h, W, d]` and values `[B, h, W, d']` of a layer, in the W slots of `window`;
        views that must not be written to.
        """
        stored = self.cache.keys[layer], self.cache.values[layer]
        keys, values = (x.transpose(1, 2).narrow(2, 0, self.cache.in_use) for x in stored)
        return keys, values

    def window(self, num_queries: int) -> Window:
        """A window of queries that see the text and nothing behind it, for `attend` of
        `specdec.targets.attention`. A row without text sees its first slot, which is garbage:
        nothing may be proposed from it.
        """
        slots = (self.lengths - 1).clamp(min=0)[:, None].expand(-1, num_queries)
        return Window(slots, self.cache.in_use, has_kernels=self.cache.has_kernels)

    def forward(
        self, model: SlotModel, tokens: Tensor, *, offset: int = 0, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """One forward over tokens behind the text. What it writes lies where the target's next step
        writes, so nothing has to be taken back.

        Args:
            model: that runs: the target, a part of it (`Target.part`), or another model with the
                same keys and values.
            tokens: `[B, N]` int64; the first ones behind the text are the row's root, which the
                target has not read yet, and what was drafted after it.
            offset: so many tokens behind the text the first of them stands.
            options: of `SlotModel.forward`: `positions` and `visible` of trees, `logits_to_keep`.

        Returns:
            Logits `[B, N, V]`, and features `[B, N, F]` or `None`.

        Raises:
            ValueError: an offset below 0, in the text; or more tokens behind it than there is
                `room` for.
        """
        if self.room is not None and offset + tokens.shape[1] > self.room:
            raise ValueError(
                f"{tokens.shape[1]} tokens at offset {offset} behind the text need "
                f"{offset + tokens.shape[1]} slots, and a row has {self.room} there: K + 1, and "
                "the drafter's extra_slots; declare the others as extra_slots in its class"
            )
        first = self.lengths[:, None] + check_integer("offset", offset, 0)
        slots = first + torch.arange(tokens.shape[1], device=tokens.device)
        own = dict(self._inputs)
        if model.model is not self.target.model:  # another one's adapters have other numbers
            own.pop("adapter", None)
        return model.forward(tokens, self.cache, slots, row_inputs=own, **options)


def refuse_unread_target(drafter: Any, error: AttributeError) -> None:
    """Raises `TypeError` where an error is that of a drafter that reads `Context.target` without
    asking for it.
    """
    names = {*dir(TargetText), *(field.name for field in fields(TargetText))}
    is_none = error.obj is None and error.name in names
    if is_none and not drafter.reads_target:
        raise TypeError(
            f"{type(drafter).__name__} reads context.target.{error.name}, and context.target is "
            "None for a drafter that does not ask for it; set reads_target = True on its class"
        ) from error
