"""The gate from logits to laws: temperature, and one floor that all truncations come down to.

Every truncation keeps the largest logits. What it keeps is therefore told by the smallest kept
entry alone: the pair of its logit and, because equal logits may be cut apart, its token id. Top-k,
top-p and min-p together are the highest of their floors.

Legend: B rows, V vocabulary; logits are `[B, V]` or `[B, N, V]`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Floor(NamedTuple):
    """Keeps token v of a row iff (logit of v, v) >= (logits, ids), compared in this order.

    Args:
        logits: `[B]` or `[B, N]`, in units of the scaled logits.
        ids: int64 of the same shape.
    """

    logits: Tensor
    ids: Tensor


class Gate(NamedTuple):
    """How logits become a law.

    Args:
        temperature: `[B]` > 0, what logits are divided by; `None` is 1 in every row.
        is_greedy: `[B]` bool, rows whose law is one-hot on the largest logit, the lowest id among
            equals; `None` is no row.
        floor: what is kept; `None` is everything.
    """

    temperature: Tensor | None = None
    is_greedy: Tensor | None = None
    floor: Floor | None = None


class Truncation(NamedTuple):
    """What to keep; each `None` where no row uses it, at least one given.

    Args:
        top_k: `[B]` int64, 0 for all.
        tail: `[B]` float64, 1 - top_p: a token goes while the mass up to and including it, from the
            least likely, is <= this; -1 keeps all.
        min_p: `[B]` float64, 0 for all.
        largest_k: the largest `top_k`, known to the host.
    """

    top_k: Tensor | None = None
    tail: Tensor | None = None
    min_p: Tensor | None = None
    largest_k: int = 0


def law(logits: Tensor, gate: Gate) -> Tensor:
    """Probabilities of the shape of `logits`, float32 (float64 for float64 logits)."""
    scaled = scale(logits, gate.temperature)
    kept = scaled
    if gate.floor is not None:
        kept = scaled.masked_fill(~is_kept(scaled, gate.floor), -torch.inf)
    probs = torch.softmax(kept, dim=-1)
    return with_greedy_rows(probs, logits, gate.is_greedy)


def with_greedy_rows(probs: Tensor, logits: Tensor, is_greedy: Tensor | None) -> Tensor:
    """Probabilities of the shape of `logits`, one-hot in the rows `[B]` that are greedy."""
    if is_greedy is None:
        return probs
    best = logits.argmax(dim=-1, keepdim=True)  # the first of equal maxima
    one_hot = torch.zeros_like(probs).scatter_(-1, best, 1.0)
    return torch.where(beside(is_greedy, logits), one_hot, probs)


def scale(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Logits in at least float32, divided by the rows' temperatures."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature is None else logits / beside(temperature, logits)


def is_kept(scaled: Tensor, floor: Floor) -> Tensor:
    """Bool of the shape of `scaled`."""
    at, ids = floor.logits[..., None], torch.arange(scaled.shape[-1], device=scaled.device)
    return (scaled > at) | ((scaled == at) & (ids >= floor.ids[..., None]))


def find_floor(logits: Tensor, temperature: Tensor | None, truncation: Truncation) -> Floor:
    """The floor of top-k, then top-p of what is left, then min-p, as HF's warpers in their order.

    Ties at the k-th logit are kept; of ties at the edge of top-p the lowest ids go first; min-p
    keeps a token whose probability is at least `min_p` times the largest.
    """
    scaled = left = scale(logits, temperature)
    floor = None
    if truncation.top_k is not None:
        floor = _floor_of_top_k(scaled, truncation.top_k, truncation.largest_k)
    for column, find in ((truncation.tail, _floor_of_top_p), (truncation.min_p, _floor_of_min_p)):
        if column is not None:
            if floor is not None:
                left = scaled.masked_fill(~is_kept(scaled, floor), -torch.inf)
            floor = higher(floor, find(left, column))
    return floor


def _floor_of_top_k(scaled: Tensor, top_k: Tensor, largest_k: int) -> Floor:
    largest = scaled.topk(min(largest_k, scaled.shape[-1]), dim=-1).values
    kth = beside(top_k, scaled).clamp(1, largest.shape[-1]) - 1
    at = largest.gather(-1, kth.expand(*scaled.shape[:-1], 1))
    at = at.masked_fill(beside(top_k == 0, scaled), -torch.inf)[..., 0]
    return Floor(at, torch.zeros_like(at, dtype=torch.long))


def _floor_of_top_p(scaled: Tensor, tail: Tensor) -> Floor:
    ascending, order = scaled.sort(dim=-1, stable=True)
    gone = ascending.softmax(dim=-1).cumsum(dim=-1) <= beside(tail, scaled)
    first = gone[..., :-1].sum(dim=-1, keepdim=True)  # the most likely token always stays
    return Floor(ascending.gather(-1, first)[..., 0], order.gather(-1, first)[..., 0])


def _floor_of_min_p(scaled: Tensor, min_p: Tensor) -> Floor:
    probs = scaled.softmax(dim=-1)
    kept = probs >= beside(min_p, scaled) * probs.amax(dim=-1, keepdim=True)
    at = scaled.masked_fill(~kept, torch.inf).amin(dim=-1)
    return Floor(at, torch.zeros_like(at, dtype=torch.long))


def higher(one: Floor | None, other: Floor) -> Floor:
    """The floor that keeps what both keep; `None` keeps everything."""
    if one is None:
        return other
    is_higher = (other.logits > one.logits) | ((other.logits == one.logits) & (other.ids > one.ids))
    pairs = zip(other, one, strict=True)
    return Floor(*(torch.where(is_higher, theirs, ours) for theirs, ours in pairs))


def beside(column: Tensor, logits: Tensor) -> Tensor:
    """Per-row values shaped and typed to meet `[B, ..., V]`."""
    column = column.to(logits.dtype) if column.is_floating_point() else column
    return column.view(-1, *[1] * (logits.dim() - 1))
