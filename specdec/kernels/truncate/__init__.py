"""Truncation: top-k, top-p and min-p as one cutoff per row. See README.md.

Wide rows on a CPU go through `cpu.py`, which gives the definition's numbers faster.
"""

from functools import wraps

from torch import Tensor

from specdec.kernels.choice import suits_kernels
from specdec.kernels.truncate import cpu, reference
from specdec.kernels.truncate.reference import Cutoff, Truncation, WarpParams


@wraps(reference.find_cutoff)
def find_cutoff(logits: Tensor, temperature: Tensor | None, truncation: Truncation) -> Cutoff:
    """`reference.find_cutoff`, or its Triton kernels on a GPU."""
    if not (logits.is_cuda and suits_kernels(logits)):
        definition = cpu if cpu.is_wide(logits) else reference
        return definition.find_cutoff(logits, temperature, truncation)
    from specdec.kernels.truncate import triton

    return triton.find_cutoff(logits, temperature, truncation)


@wraps(reference.warp_probs)
def warp_probs(logits: Tensor, params: WarpParams, out: Tensor | None = None) -> Tensor:
    """`reference.warp_probs`, or `cpu.warp_probs` for wide rows on a CPU."""
    definition = cpu if cpu.is_wide(logits) else reference
    return definition.warp_probs(logits, params, out)
