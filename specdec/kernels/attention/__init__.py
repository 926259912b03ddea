"""Attention: a few queries per row over the slots that the row has filled. See README.md."""

from functools import wraps

from torch import Tensor

from specdec.kernels.attention import reference
from specdec.kernels.attention.reference import CAUSAL, MAX_WINDOW, AttentionOptions
from specdec.kernels.choice import suits_kernels

MAX_ROWS = 512
"""Query rows (queries times query heads per head of keys) of a window that attends raggedly. Longer
windows, chunks of a prompt, have the arithmetic that makes up for a dense mask.
"""


@wraps(reference.ragged_attention)
def ragged_attention(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, options: AttentionOptions = CAUSAL
) -> Tensor:
    """`reference.ragged_attention`, or its Triton kernels on a GPU."""
    if not (query.is_cuda and suits_kernels(query)):
        return reference.ragged_attention(query, keys, values, slots, options)
    from specdec.kernels.attention import triton

    return triton.ragged_attention(query, keys, values, slots, options)


def attends_raggedly(query: Tensor, keys: Tensor, *, has_window_mask: bool = False) -> bool:
    """Whether `ragged_attention` is the way to attend here: it has a kernel, and the queries are
    few. Elsewhere attention with a dense mask is faster than the definition.

    Args:
        query: `[B, Hq, N, D]`.
        keys: `[B, Hkv, S, D]`.
        has_window_mask: whether the window has a mask of its own.
    """
    if not query.is_cuda or not suits_kernels(query) or query.dtype != keys.dtype:
        return False
    _, num_heads, num_queries, _ = query.shape
    limit = MAX_WINDOW if has_window_mask else num_queries
    return num_queries <= limit and num_queries * num_heads // keys.shape[1] <= MAX_ROWS
