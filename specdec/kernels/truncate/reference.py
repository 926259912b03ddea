"""From logits to probabilities: temperature, and one cutoff per row for all truncations together.

Every truncation keeps a top set of the tokens, ordered by (logit, id). Its smallest kept pair
describes it, so top-k, top-p and min-p together are the largest of their three pairs. The id is
needed because top-p may keep some of several equal logits. See README.md.

Legend: B rows, N window indices, V vocabulary; logits are `[B, V]` or `[B, N, V]`.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from specdec.kernels.truncate import cpu
from specdec.kernels.types import Cutoff, FilterParams, Truncation, suits_kernels

WIDE_TRUNCATE = 8192
"""From this many logits per row on a CPU is faster row by row, with the operations of `cpu.py`."""


def filtered_probs(logits: Tensor, params: FilterParams, out: Tensor | None = None) -> Tensor:
    """Probabilities of the shape of `logits`, float32 (float64 for float64 logits); written to
    `out` if it is given.
    """
    if is_wide(logits):
        probs = torch.empty_like(logits, dtype=torch.float32) if out is None else out
        for b, n, row in _rows(logits):
            row = scale(row, _of_row(params.temperature, b))
            if params.cutoff is not None:
                at = (values.reshape(len(logits), -1)[b, n : n + 1] for values in params.cutoff)
                row = cpu.drop_below(row, *at)
            torch.softmax(row, dim=-1, out=_window(probs)[b, n : n + 1])
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
    scaled = scale(logits, params.temperature)
    if params.cutoff is None:
        return scaled
    return scaled.masked_fill(~is_kept(scaled, params.cutoff), -torch.inf)


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
    if not is_wide(logits):
        return _cutoff(scale(logits, temperature), truncation, drop_below, _top_p_cutoff)
    cutoffs = []
    for b, _, row in _rows(logits):
        limits = (_of_row(values, b) for values in truncation[:3])
        row, limits = scale(row, _of_row(temperature, b)), Truncation(*limits, truncation.max_top_k)
        cutoffs.append(_cutoff(row, limits, _drop_below_in_row, _top_p_cutoff_of_row))
    return Cutoff(*(torch.cat(v).view(logits.shape[:-1]) for v in zip(*cutoffs, strict=True)))


def _cutoff(scaled: Tensor, truncation: Truncation, drop: Callable, find_top_p: Callable) -> Cutoff:
    """`find_cutoff` of scaled logits; how tokens are dropped, and how the cutoff of top-p is found,
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


def _top_k_cutoff(scaled: Tensor, top_k: Tensor, max_top_k: int) -> Cutoff:
    largest = scaled.topk(min(max_top_k, scaled.shape[-1]), dim=-1).values
    kth = per_row(top_k, scaled).clamp(1, largest.shape[-1]) - 1
    at = largest.gather(-1, kth.expand(*scaled.shape[:-1], 1))
    at = at.masked_fill(per_row(top_k == 0, scaled), -torch.inf)[..., 0]
    return Cutoff(at, torch.zeros_like(at, dtype=torch.long))


def _top_p_cutoff(scaled: Tensor, top_p: Tensor) -> Cutoff:
    ascending, ids = scaled.sort(dim=-1, stable=True)
    mass = ascending.softmax(dim=-1).cumsum(dim=-1)
    is_dropped = mass <= per_row(_droppable_mass(top_p), scaled)
    first = is_dropped[..., :-1].sum(dim=-1, keepdim=True)  # the most likely token always stays
    return Cutoff(ascending.gather(-1, first)[..., 0], ids.gather(-1, first)[..., 0])


def _droppable_mass(top_p: Tensor) -> Tensor:
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


def is_wide(logits: Tensor) -> bool:
    """Whether logits `[..., V]` are processed row by row. Float64 logits, as oracles have, and
    logits with gradients are not.
    """
    fits = logits.shape[-1] >= WIDE_TRUNCATE and logits.device.type == "cpu"
    return fits and logits.dtype != torch.float64 and not logits.requires_grad


def _rows(logits: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """(batch row, window index, logits `[1, V]`) of every row."""
    for b, window in enumerate(_window(logits)):
        for n in range(len(window)):
            yield b, n, window[n : n + 1]


def _window(table: Tensor) -> Tensor:
    """`[B, N, V]`, N = 1 where there is no window."""
    return table[:, None] if table.dim() == 2 else table


def _of_row(values: Tensor | None, b: int) -> Tensor | None:
    """`[1]`: the value of a batch row."""
    return None if values is None else values[b : b + 1]


def _drop_below_in_row(scaled: Tensor, cutoff: Cutoff) -> Tensor:
    return cpu.drop_below(scaled, *cutoff)


def _top_p_cutoff_of_row(scaled: Tensor, top_p: Tensor) -> Cutoff:
    limit = cpu.largest_droppable(_droppable_mass(top_p))
    return Cutoff(*cpu.top_p_cutoff(scaled, limit, cpu.FEW, cpu.SAMPLES))
