"""Gemma 3n: layers that hand on several hidden states of a token, stacked before the rows, and MLPs
that keep activations above a multiple of their deviation.

HF's MLP makes that multiple anew in every forward, by a distribution that looks at its arguments
on the host. In a view it is a number.

Source: modeling_gemma3n.py of transformers 5.24, `Gemma3nTextAltUp` and `Gemma3nTextMLP`.
"""

from __future__ import annotations

from functools import partial
from statistics import NormalDist

from torch import Tensor, nn

from specdec.hf.layers import SPARSE

SPARSITY = "activation_sparsity"
"""The part of all activations that a method of these MLPs sets to zero."""


def edit(view: nn.Module, attention: str | None = None) -> None:
    """Makes these MLPs of a private view leave the host alone."""
    for module in view.modules():
        if hasattr(type(module), SPARSE) and (sparsity := getattr(module, SPARSITY)) > 0.0:
            setattr(module, SPARSE, partial(_above, NormalDist().inv_cdf(sparsity)))


def _above(multiple: float, inputs: Tensor) -> Tensor:
    """What is left of inputs above their mean by so many deviations."""
    deviation = inputs.std(dim=-1, keepdim=True, unbiased=False)
    multiple = inputs.new_full((), multiple)  # rounded to their data type, as HF does
    return (inputs - (inputs.mean(dim=-1, keepdim=True) + deviation * multiple)).relu()
