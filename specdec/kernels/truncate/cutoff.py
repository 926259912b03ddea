"""The cutoff of scaled logits, by all truncations together.

Legend: B rows, N window indices, V vocabulary; logits are `[B, V]` or `[B, N, V]`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.kernels.types import Cutoff, Truncation


def cutoff_of(
    scaled: Tensor, truncation: Truncation, drop: Callable, find_top_p: Callable
) -> Cutoff:
    """The cutoff of scaled logits; how tokens are dropped, and how the cutoff of top-p is found,
    are arguments.
    """
    left, cutoff = scaled, None
    if truncation.top_k is not None:
        cutoff = _top_k_cutoff(scaled, truncation.top_k, truncation.max_top_k)
    for values, find in ((truncation.top_p, find_top_p), (truncation.min_p, _min_p_cutoff)):
        if values is not None:
            if cutoff is not None:
                left = drop(scaled, cutoff)
            cutoff = _higher(cutoff, find(left, values))
    return cutoff


def scale(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Logits in at least float32, divided by the rows' temperatures."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature is None else logits / per_row(temperature, logits)


def is_kept(scaled: Tensor, cutoff: Cutoff) -> Tensor:
    """Bool of the shape of the scaled logits."""
    at, ids = cutoff.logits[..., None], torch.arange(scaled.shape[-1], device=scaled.device)
    return (scaled > at) | ((scaled == at) & (ids >= cutoff.ids[..., None]))


def drop_below(scaled: Tensor, cutoff: Cutoff) -> Tensor:
    """The scaled logits, -inf below the cutoff."""
    return scaled.masked_fill(~is_kept(scaled, cutoff), -torch.inf)


def _top_k_cutoff(scaled: Tensor, top_k: Tensor, max_top_k: int) -> Cutoff:
    largest = scaled.topk(min(max_top_k, scaled.shape[-1]), dim=-1).values
    kth = per_row(top_k, scaled).clamp(1, largest.shape[-1]) - 1
    at = largest.gather(-1, kth.expand(*scaled.shape[:-1], 1))
    at = at.masked_fill(per_row(top_k == 0, scaled), -torch.inf)[..., 0]
    return Cutoff(at, torch.zeros_like(at, dtype=torch.long))


def top_p_cutoff(scaled: Tensor, top_p: Tensor) -> Cutoff:
    """The cutoff of top-p alone."""
    ascending, ids = scaled.sort(dim=-1, stable=True)
    mass = ascending.softmax(dim=-1).cumsum(dim=-1)
    is_dropped = mass <= per_row(droppable_mass(top_p), scaled)
    first = is_dropped[..., :-1].sum(dim=-1, keepdim=True)  # the most likely token always stays
    return Cutoff(ascending.gather(-1, first)[..., 0], ids.gather(-1, first)[..., 0])


def droppable_mass(top_p: Tensor) -> Tensor:
    """`[B]` float64: 1 - top_p, the mass that top-p may drop; -1, less than any mass, at top_p = 1.

    The comparison with a cumulative mass is in the precision of the logits.
    """
    return torch.where(top_p < 1, 1 - top_p, -1.0)


def _min_p_cutoff(scaled: Tensor, min_p: Tensor) -> Cutoff:
    probs = scaled.softmax(dim=-1)
    kept = probs >= per_row(min_p, scaled) * probs.amax(dim=-1, keepdim=True)
    at = scaled.masked_fill(~kept, torch.inf).amin(dim=-1)
    return Cutoff(at, torch.zeros_like(at, dtype=torch.long))


def _higher(one: Cutoff | None, other: Cutoff) -> Cutoff:
    """The cutoff that keeps what both keep; `None` keeps everything."""
    if one is None:
        return other
    is_higher = (other.logits > one.logits) | ((other.logits == one.logits) & (other.ids > one.ids))
    return Cutoff(*(torch.where(is_higher, b, a) for a, b in zip(one, other, strict=True)))


def per_row(values: Tensor, logits: Tensor) -> Tensor:
    """`[B]` values shaped and typed to be broadcast over `[B, ..., V]`."""
    values = values.to(logits.dtype) if values.is_floating_point() else values
    return values.view(-1, *[1] * (logits.dim() - 1))
