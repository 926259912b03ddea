"""Truncation on a CPU of rows that have a top-k: top-p and min-p look at the k candidates by NumPy,
whose operations on few numbers take less time than torch's.

Legend: B rows, N window indices, V vocabulary; R rows of all windows, n candidates of each, k and
ties.
"""

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.types import Truncation


def keep_candidates(logits: Tensor, temperature: Tensor | None, truncation: Truncation) -> Tensor:
    """Logits over the temperatures, -inf where top-k, then top-p, then min-p drop them, as
    `reference.find_cutoff` says.

    Sums do not depend on how many candidates other rows have. The definition rounds its sum over V
    logits to float32, and may differ where a mass is within that rounding of 1 - top_p.

    Args:
        logits: `[B, V]` or `[B, N, V]`, in float32 or less.
        temperature: as of `find_cutoff`.
        truncation: of rows of which some have a top-k; what comes of the others means nothing.

    Returns:
        Float32 of the shape of `logits`.
    """
    scaled = logits.float()
    if temperature is not None:
        scaled = scaled / temperature.float().view(-1, *[1] * (logits.dim() - 1))
    top_k, top_p, min_p, most, _ = truncation
    if top_p is not None or min_p is not None:
        return truncate_candidates(scaled, top_k, most, top_p, min_p)
    at = scaled.topk(min(most, scaled.shape[-1]), dim=-1).values
    index = (top_k - 1).clamp(0, at.shape[-1] - 1).view(-1, *[1] * (logits.dim() - 1))
    return torch.where(scaled >= at.take_along_dim(index, dim=-1), scaled, -torch.inf)


# One operation to the dispatcher, so that `no_host_sync` on a CPU checks the step that a GPU would
# run: NumPy reads the memory of its arguments, and ties decide how many candidates there are.
@torch.library.custom_op("specdec::truncate_candidates", mutates_args=(), device_types="cpu")
def truncate_candidates(
    scaled: Tensor, top_k: Tensor, most: int, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """As `keep_candidates`, with another truncation beside top-k."""
    table = scaled.reshape(-1, scaled.shape[-1])

    def of_rows(values: Tensor) -> np.ndarray:  # [R, 1]
        return values.numpy().repeat(max(len(table) // len(values), 1))[:, None]

    logits, ids = _candidates(table, of_rows(top_k)[:, 0], most)

    with np.errstate(invalid="ignore"):  # of rows that have no distribution
        if top_p is not None:
            top_p = of_rows(top_p)
            most = np.where(top_p < 1, 1 - top_p, -1).astype(np.float32)  # as `droppable_mass`
            mass = _probs(logits).cumsum(axis=1, dtype=np.float64).astype(np.float32)
            logits[:, :-1][mass[:, :-1] <= most] = -np.inf  # the most likely token stays
        if min_p is not None:
            probs = _probs(logits)
            logits[probs < of_rows(min_p).astype(np.float32) * probs[:, -1:]] = -np.inf
    kept = torch.full_like(table, -torch.inf)
    kept.scatter_(1, torch.from_numpy(ids), torch.from_numpy(logits))
    return kept.view(scaled.shape)


@truncate_candidates.register_fake
def _(
    scaled: Tensor, top_k: Tensor, most: int, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    return torch.empty(scaled.shape, dtype=scaled.dtype, device=scaled.device)


def _candidates(table: Tensor, top_k: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest logits of each row of a table `[R, V]`, -inf below the row's k-th, and their ids:
    `[R, n]` in ascending order of (logit, id). All ties with the k-th are there.
    """
    rows, vocab_size = np.arange(len(table)), table.shape[1]
    top = table.topk(min(most + 1, vocab_size), dim=1)
    values = top.values.numpy()
    at = values[rows, top_k.clip(1, vocab_size) - 1]
    next_ones = values[rows, top_k.clip(0, values.shape[1] - 1)]
    is_tied = (top_k < vocab_size) & (next_ones == at) & (at > -np.inf)
    if is_tied.any():  # with one that was left out, or with several
        counts = (table >= torch.from_numpy(np.where(is_tied, at, np.inf))[:, None]).sum(dim=1)
        top = table.topk(min(max(int(counts.max()), most), vocab_size), dim=1)
    logits, ids = (values.numpy() for values in top)
    order, each = np.lexsort((ids, logits), axis=1), rows[:, None]
    logits = logits[each, order]
    logits[logits < at[:, None]] = -np.inf
    return logits, ids[each, order]


def _probs(logits: np.ndarray) -> np.ndarray:
    """Float32, of logits in ascending order."""
    weights = np.exp((logits - logits[:, -1:]).astype(np.float64))
    return (weights / weights.cumsum(axis=1)[:, -1:]).astype(np.float32)  # in order, zeros first
