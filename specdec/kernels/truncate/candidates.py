"""Truncation on a CPU where all rows have one top-k: top-p and min-p look at the k candidates, by
NumPy, whose operations on few numbers take a fifth of the time of torch's.

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

    Masses are rounded to float32 from float64, so they do not depend on how many candidates other
    rows have. The definition rounds its sum over V logits, and may differ where a mass is within
    float32 rounding of 1 - top_p.

    Args:
        logits: `[B, V]` or `[B, N, V]`, in float32 or less.
        temperature: as of `find_cutoff`.
        truncation: of rows that share their top-k.

    Returns:
        Float32 of the shape of `logits`.
    """
    scaled = logits.float()
    if temperature is not None:
        scaled = scaled / temperature.float().view(-1, *[1] * (logits.dim() - 1))
    _, top_p, min_p, top_k, _ = truncation
    if top_p is not None or min_p is not None:
        return truncate_candidates(scaled, top_k, top_p, min_p)
    at = scaled.topk(min(top_k, scaled.shape[-1]), dim=-1).values[..., -1:]
    return torch.where(scaled >= at, scaled, -torch.inf)


# One operation to the dispatcher, so that `no_host_sync` on a CPU checks the step that a GPU would
# run: NumPy reads the memory of its arguments, and ties decide how many candidates there are.
@torch.library.custom_op("specdec::truncate_candidates", mutates_args=(), device_types="cpu")
def truncate_candidates(
    scaled: Tensor, top_k: int, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """As `keep_candidates`, with another truncation beside top-k."""
    table = scaled.reshape(-1, scaled.shape[-1])
    logits, ids = _candidates(table, top_k)

    def of_rows(values: Tensor) -> np.ndarray:  # [R, 1]
        return values.numpy().repeat(max(len(table) // len(values), 1))[:, None]

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
def _(scaled: Tensor, top_k: int, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    return torch.empty(scaled.shape, dtype=scaled.dtype, device=scaled.device)


def _candidates(table: Tensor, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest logits of each row of a table `[R, V]`, -inf below the k-th, and their ids: `[R,
    n]` in ascending order of (logit, id). All ties with the k-th are there.
    """
    top = table.topk(min(top_k + 1, table.shape[1]), dim=1)
    at = top.values[:, min(top_k, table.shape[1]) - 1].numpy()
    if top_k < table.shape[1]:
        is_tied = (top.values[:, top_k].numpy() == at) & (at > -np.inf)
        if is_tied.any():  # with one that was left out, or with several
            counts = (table >= torch.from_numpy(np.where(is_tied, at, np.inf))[:, None]).sum(dim=1)
            top = table.topk(max(int(counts.max()), top_k), dim=1)
    logits, ids = (values.numpy() for values in top)
    order = np.lexsort((ids, logits), axis=1)
    each = np.arange(len(order))[:, None]
    logits = logits[each, order]
    logits[logits < at[:, None]] = -np.inf
    return logits, ids[each, order]


def _probs(logits: np.ndarray) -> np.ndarray:
    """Float32, of logits in ascending order."""
    weights = np.exp((logits - logits[:, -1:]).astype(np.float64))
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
