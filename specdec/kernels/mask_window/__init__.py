"""Mask window: the rows of one pass of a parallel drafter, from ragged contexts. See README.md."""

from specdec.kernels.mask_window.reference import MaskWindow, WindowSpec, expand_window

__all__ = ["MaskWindow", "WindowSpec", "expand_window"]
