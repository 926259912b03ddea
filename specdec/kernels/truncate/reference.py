"""From logits to probabilities: temperature, and one cutoff per row for all truncations together.

Every truncation keeps a top set of the tokens, ordered by (logit, id). Its smallest kept pair
describes it, so top-k, top-p and min-p together are the largest of their three pairs. The id is
needed because top-p may keep some of several equal logits.

Legend: B rows, N window indices, V vocabulary; logits are `[B, V]` or `[B, N, V]`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Cutoff(NamedTuple):
    """Token v of a row is kept iff (scaled logit of v, v) >= (logits, ids), compared in this order.

    Args:
        logits: `[B]` or `[B, N]`, in units of the scaled logits.
        ids: int64 of the same shape.
    """

    logits: Tensor
    ids: Tensor


class WarpParams(NamedTuple):
    """How logits become probabilities.

    Args:
        temperature: `[B]` > 0, divides the logits; `None` is 1 in every row.
        is_greedy: `[B]` bool, rows whose distribution is one-hot on the largest logit, the lowest
            id among equals; `None` is no row.
        cutoff: tokens below it have probability 0; `None` keeps all.
    """

    temperature: Tensor | None = None
    is_greedy: Tensor | None = None
    cutoff: Cutoff | None = None


class Truncation(NamedTuple):
    """What to keep; each field is `None` where no row uses it, at least one is given.

    Args:
        top_k: `[B]` int64, 0 keeps all.
        top_p: `[B]` float64 in 0..1, 1 keeps all.
        min_p: `[B]` float64 in 0..1, 0 keeps all.
        max_top_k: the largest `top_k`, a number on the host.
    """

    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    max_top_k: int = 0


def warp_probs(logits: Tensor, params: WarpParams, out: Tensor | None = None) -> Tensor:
    """Probabilities of the shape of `logits`, float32 (float64 for float64 logits); written to
    `out` if it is given.
    """
    scaled = kept = scale(logits, params.temperature)
    if params.cutoff is not None:
        kept = drop_below(scaled, params.cutoff)
    probs = one_hot_greedy_rows(kept.softmax(dim=-1), logits, params.is_greedy)
    return probs if out is None else out.copy_(probs)


def one_hot_greedy_rows(probs: Tensor, logits: Tensor, is_greedy: Tensor | None) -> Tensor:
    """The probabilities `[B, ..., V]`, one-hot in the rows `[B]` that are greedy."""
    if is_greedy is None:
        return probs
    best = logits.argmax(dim=-1, keepdim=True)  # the first of equal maxima
    one_hot = torch.zeros_like(probs).scatter_(-1, best, 1.0)
    return torch.where(per_row(is_greedy, logits), one_hot, probs)


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


def find_cutoff(logits: Tensor, temperature: Tensor | None, truncation: Truncation) -> Cutoff:
    """The cutoff of top-k, then top-p of what top-k kept, then min-p, as Hugging Face's warpers.

    Ties at the k-th logit are kept. Of ties at the edge of top-p those of the lowest ids are
    dropped. Min-p keeps a token whose probability is at least `min_p` times the largest.

    Args:
        logits: `[B, V]` or `[B, N, V]`.
        temperature: `[B]` > 0, or `None` for 1.
        truncation: what to keep.
    """
    scaled = left = scale(logits, temperature)
    cutoff = None
    if truncation.top_k is not None:
        cutoff = _top_k_cutoff(scaled, truncation.top_k, truncation.max_top_k)
    for values, find in ((truncation.top_p, _top_p_cutoff), (truncation.min_p, _min_p_cutoff)):
        if values is not None:
            if cutoff is not None:
                left = drop_below(scaled, cutoff)
            cutoff = higher(cutoff, find(left, values))
    return cutoff


def droppable_mass(top_p: Tensor) -> Tensor:
    """`[B]` float64: 1 - top_p, the mass that top-p may drop; -1, less than any mass, at top_p = 1.

    The comparison with a cumulative mass is in the precision of the logits.
    """
    return torch.where(top_p < 1, 1 - top_p, -1.0)


def _top_k_cutoff(scaled: Tensor, top_k: Tensor, max_top_k: int) -> Cutoff:
    largest = scaled.topk(min(max_top_k, scaled.shape[-1]), dim=-1).values
    kth = per_row(top_k, scaled).clamp(1, largest.shape[-1]) - 1
    at = largest.gather(-1, kth.expand(*scaled.shape[:-1], 1))
    at = at.masked_fill(per_row(top_k == 0, scaled), -torch.inf)[..., 0]
    return Cutoff(at, torch.zeros_like(at, dtype=torch.long))


def _top_p_cutoff(scaled: Tensor, top_p: Tensor) -> Cutoff:
    ascending, ids = scaled.sort(dim=-1, stable=True)
    mass = ascending.softmax(dim=-1).cumsum(dim=-1)
    is_dropped = mass <= per_row(droppable_mass(top_p), scaled)
    first = is_dropped[..., :-1].sum(dim=-1, keepdim=True)  # the most likely token always stays
    return Cutoff(ascending.gather(-1, first)[..., 0], ids.gather(-1, first)[..., 0])


def _min_p_cutoff(scaled: Tensor, min_p: Tensor) -> Cutoff:
    probs = scaled.softmax(dim=-1)
    kept = probs >= per_row(min_p, scaled) * probs.amax(dim=-1, keepdim=True)
    at = scaled.masked_fill(~kept, torch.inf).amin(dim=-1)
    return Cutoff(at, torch.zeros_like(at, dtype=torch.long))


def higher(one: Cutoff | None, other: Cutoff) -> Cutoff:
    """The cutoff that keeps what both keep; `None` keeps everything."""
    if one is None:
        return other
    is_higher = (other.logits > one.logits) | ((other.logits == one.logits) & (other.ids > one.ids))
    return Cutoff(*(torch.where(is_higher, b, a) for a, b in zip(one, other, strict=True)))


def per_row(values: Tensor, logits: Tensor) -> Tensor:
    """`[B]` values shaped and typed to be broadcast over `[B, ..., V]`."""
    values = values.to(logits.dtype) if values.is_floating_point() else values
    return values.view(-1, *[1] * (logits.dim() - 1))
