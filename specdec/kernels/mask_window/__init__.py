"""Mask window: the rows of one pass of a parallel drafter, from ragged contexts. See README.md."""

from functools import wraps

from torch import Tensor

from specdec.kernels.mask_window import reference
from specdec.kernels.mask_window.reference import MaskWindow, WindowSpec


@wraps(reference.expand_window)
def expand_window(tokens: Tensor, start: Tensor, num_new: Tensor, spec: WindowSpec) -> MaskWindow:
    """`reference.expand_window`, or its Triton kernels on a GPU."""
    if not tokens.is_cuda:
        return reference.expand_window(tokens, start, num_new, spec)
    from specdec.kernels.mask_window import triton

    return triton.expand_window(tokens, start, num_new, spec)
