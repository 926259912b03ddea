"""Truncation: top-k, top-p and min-p as one cutoff per row. See README.md."""

from specdec.kernels.truncate.reference import (
    Cutoff,
    Truncation,
    WarpParams,
    find_cutoff,
    is_kept,
    scale,
    warp_probs,
)

__all__ = [
    "Cutoff",
    "Truncation",
    "WarpParams",
    "find_cutoff",
    "is_kept",
    "scale",
    "warp_probs",
]
