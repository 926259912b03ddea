"""Attention: a few queries per row over the slots that the row has filled. See README.md."""

from specdec.kernels.attention.reference import (
    CAUSAL,
    MAX_WINDOW,
    AttentionOptions,
    ragged_attention,
    visible_slots,
)

__all__ = ["CAUSAL", "MAX_WINDOW", "AttentionOptions", "ragged_attention", "visible_slots"]
