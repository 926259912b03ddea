"""Layers that hand on several hidden states of a token, stacked before the rows (Gemma 3n).

Source: modeling_gemma3n.py of transformers 5.24, class `Gemma3nTextAltUp`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class Streams(NamedTuple):
    """Of the layers of a model.

    Args:
        count: how many there are.
        read: index of the one that attention reads.
    """

    count: int
    read: int

    @classmethod
    def of(cls, model: nn.Module) -> Streams | None:
        """`None` for a model whose layers hand on one hidden state `[B, N, H]`."""
        config = model.config.get_text_config()
        count = getattr(config, "altup_num_inputs", None)
        return None if count is None else cls(count, config.altup_active_idx)

    def rows_first(self, states: Tensor) -> Tensor:
        """`[B, N, count H]` of what a layer gets or returns."""
        return states.permute(1, 2, 0, 3).flatten(2)

    def as_layers_have_them(self, states: Tensor) -> Tensor:
        """`[count, B, N, H]`: `rows_first` taken back."""
        return states.unflatten(2, (self.count, -1)).permute(2, 0, 1, 3)

    def feature(self, states: Tensor) -> Tensor:
        """`[B, N, H]`, the hidden state by its index: that which attention reads."""
        return states[self.read]
