"""From logits to probabilities: temperature, and one cutoff per row for all truncations together.

Every truncation keeps a top set of the tokens, ordered by (logit, id). Its smallest kept pair
describes it, so top-k, top-p and min-p together are the largest of their three pairs. The id is
needed because top-p may keep some of several equal logits. See README.md.

Legend: B rows, N window indices, V vocabulary; logits are `[B, V]` or `[B, N, V]`.
"""

import torch
from torch import Tensor

from specdec.kernels.truncate.cutoff import (
    cutoff_of,
    drop_below,
    is_kept,
    per_row,
    scale,
    top_p_cutoff,
)
from specdec.kernels.types import Cutoff, FilterParams, Truncation, suits_kernels

WIDE_TRUNCATE = 8192
"""From this many logits per row on a CPU is faster row by row, see `rows.py`."""


def filtered_probs(logits: Tensor, params: FilterParams, out: Tensor | None = None) -> Tensor:
    """Probabilities of the shape of `logits`, float32 (float64 for float64 logits); written to
    `out` if it is given.

    Example:
        >>> logits = torch.tensor([[1.0, 0.0, 2.0]])
        >>> cutoff = Cutoff(torch.tensor([1.0]), torch.tensor([0]))  # logits, ids
        >>> filtered_probs(logits, FilterParams(cutoff=cutoff))
        tensor([[0.2689, 0.0000, 0.7311]])
    """
    if params.kept is None and is_wide(logits):
        from specdec.kernels.truncate.rows import probs_by_row

        probs = probs_by_row(logits, params, out)
        if params.is_greedy is None:
            return probs
        return probs.copy_(one_hot_greedy_rows(probs, logits, params.is_greedy))
    kept = filtered_logits(logits, params)
    probs = one_hot_greedy_rows(kept.softmax(dim=-1), logits, params.is_greedy)
    return probs if out is None else out.copy_(probs)


def filtered_logits(logits: Tensor, params: FilterParams) -> Tensor:
    """Logits in at least float32 over the rows' temperatures, -inf below their cutoffs; greedy rows
    are as all others.
    """
    if params.kept is not None:
        return params.kept
    scaled = scale(logits, params.temperature)
    if params.cutoff is None:
        return scaled
    return scaled.masked_fill(~is_kept(scaled, params.cutoff), -torch.inf)


def filter_params(
    logits: Tensor, temperature: Tensor | None, is_greedy: Tensor | None, truncation: Truncation
) -> FilterParams:
    """How these logits become probabilities; Args as `find_cutoff`, and of `FilterParams`."""
    if truncation.max_top_k and suits_cpu(logits):
        from specdec.kernels.truncate.candidates import keep_candidates

        kept = keep_candidates(logits, temperature, truncation)
        if truncation.lacks_top_k:  # a row without top-k is what it is alone
            cutoff = find_cutoff(logits, temperature, truncation)
            others = filtered_logits(logits, FilterParams(temperature, cutoff=cutoff))
            has_top_k = truncation.top_k.view(-1, *[1] * (logits.dim() - 1)) > 0
            kept = torch.where(has_top_k, kept, others)
        return FilterParams(None, is_greedy, kept=kept)
    return FilterParams(temperature, is_greedy, find_cutoff(logits, temperature, truncation))


def find_cutoff(logits: Tensor, temperature: Tensor | None, truncation: Truncation) -> Cutoff:
    """The cutoff of top-k, then top-p of what top-k kept, then min-p, as Hugging Face's warpers.

    Ties at the k-th logit are kept. Of ties at the edge of top-p those of the lowest ids are
    dropped. Min-p keeps a token whose probability is at least `min_p` times the largest.

    Args:
        logits: `[B, V]` or `[B, N, V]`.
        temperature: `[B]` > 0, or `None` for 1.
        truncation: what to keep.
    """
    if logits.is_cuda and suits_kernels(logits):
        from specdec.kernels.truncate import triton

        return triton.find_cutoff(logits, temperature, truncation)
    if is_wide(logits):
        from specdec.kernels.truncate.rows import cutoff_by_row

        return cutoff_by_row(logits, temperature, truncation)
    return cutoff_of(scale(logits, temperature), truncation, drop_below, top_p_cutoff)


def one_hot_greedy_rows(probs: Tensor, logits: Tensor, is_greedy: Tensor | None) -> Tensor:
    """The probabilities `[B, ..., V]`, one-hot in the rows `[B]` that are greedy."""
    if is_greedy is None:
        return probs
    best = logits.argmax(dim=-1, keepdim=True)  # the first of equal maxima
    one_hot = torch.zeros_like(probs).scatter_(-1, best, 1.0)
    return torch.where(per_row(is_greedy, logits), one_hot, probs)


def is_wide(logits: Tensor) -> bool:
    """Whether logits `[..., V]` are processed row by row."""
    return logits.shape[-1] >= WIDE_TRUNCATE and suits_cpu(logits)


def suits_cpu(logits: Tensor) -> bool:
    """Whether operations that read values on the host take logits: on a CPU, but for float64, as
    oracles have, and logits with gradients.
    """
    is_there = logits.device.type == "cpu"
    return is_there and logits.dtype != torch.float64 and not logits.requires_grad
