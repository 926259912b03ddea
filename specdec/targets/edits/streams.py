"""Gemma 3n: layers that hand on several hidden states of a token, stacked before the rows, and MLPs
that keep activations above a multiple of their deviation.

HF's MLP makes that multiple anew in every forward, by a distribution that looks at its arguments
on the host. In a view it is a number.

Source: modeling_gemma3n.py of transformers 5.24, `Gemma3nTextAltUp` and `Gemma3nTextMLP`.
"""

from __future__ import annotations

from functools import partial
from statistics import NormalDist
from typing import NamedTuple

from torch import Tensor, nn

SPARSE, SPARSITY = "_gaussian_topk", "activation_sparsity"
"""A method of these MLPs, and the part of all activations that it sets to zero."""


def edit_sparsity(view: nn.Module) -> None:
    """Makes these MLPs of a private view leave the host alone."""
    for module in view.modules():
        if hasattr(type(module), SPARSE) and (sparsity := getattr(module, SPARSITY)) > 0.0:
            setattr(module, SPARSE, partial(_above, NormalDist().inv_cdf(sparsity)))


def _above(multiple: float, inputs: Tensor) -> Tensor:
    """What is left of inputs above their mean by so many deviations."""
    deviation = inputs.std(dim=-1, keepdim=True, unbiased=False)
    multiple = inputs.new_full((), multiple)  # rounded to their data type, as HF does
    return (inputs - (inputs.mean(dim=-1, keepdim=True) + deviation * multiple)).relu()


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
