"""Which keys each query attends to: predicates over slots, composed, and written out as additive
masks.

A predicate takes the slots of queries and of keys, two int64 tensors that broadcast against each
other, and returns the bool tensor of what is visible.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Visible = Callable[[Tensor, Tensor], Tensor]


def causal(queries: Tensor, keys: Tensor) -> Tensor:
    """A token sees itself and what comes before it."""
    return keys <= queries


def within(sliding_window: int) -> Visible:
    """A token sees slots at most `sliding_window - 1` before its own."""

    def visible(queries: Tensor, keys: Tensor) -> Tensor:
        return keys > queries - sliding_window

    return visible


def all_of(*predicates: Visible) -> Visible:
    """What every predicate lets a token see.

    Example:
        >>> sees = all_of(causal, within(2))
        >>> sees(torch.tensor([[0], [3]]), torch.arange(5)).long()
        tensor([[1, 0, 0, 0, 0],
                [0, 0, 1, 1, 0]])
    """

    def visible(queries: Tensor, keys: Tensor) -> Tensor:
        seen = predicates[0](queries, keys)
        for predicate in predicates[1:]:
            seen = seen & predicate(queries, keys)
        return seen

    return visible


def block(first: Tensor, last: Tensor) -> Visible:
    """The tokens of a row's block, slots `first` to `last` (`[B]` each), see each other. For masks
    of queries `[B, 1, N]`.
    """
    first, last = first[:, None, None, None], last[:, None, None, None]

    def visible(queries: Tensor, keys: Tensor) -> Tensor:
        return (queries >= first) & (queries <= last) & (keys >= first) & (keys <= last)

    return visible


def any_of(*predicates: Visible) -> Visible:
    """What some predicate lets a token see."""

    def visible(queries: Tensor, keys: Tensor) -> Tensor:
        seen = predicates[0](queries, keys)
        for predicate in predicates[1:]:
            seen = seen | predicate(queries, keys)
        return seen

    return visible


def causal_within(sliding_window: int | None) -> Visible:
    """`causal`, and `within` a sliding window if there is one."""
    return causal if sliding_window is None else all_of(causal, within(sliding_window))


def slot_mask(slots: Tensor, num_attended: int, visible: Visible, dtype: torch.dtype) -> Tensor:
    """The additive mask of queries at given slots over the first slots of a cache.

    Args:
        slots: `[..., N]` int64, slots of the queries. A query at or beyond `num_attended` (a token
            to forget) sees what the last slot sees, since a row without any key would be NaN.
        num_attended: slots of the keys, a multiple of `cache.SLOT_MULTIPLE`.
        visible: who sees whom.
        dtype: of the mask, that of the queries.

    Returns:
        `[..., N, num_attended]`, contiguous: 0 where visible and -inf elsewhere.

    Example:
        >>> slot_mask(torch.tensor([1]), 4, causal, torch.float32)
        tensor([[0., 0., -inf, -inf]])
    """
    queries = slots.clamp(max=num_attended - 1)[..., None]
    seen = visible(queries, torch.arange(num_attended, device=slots.device))
    hidden = torch.full(seen.shape, -torch.inf, dtype=dtype, device=slots.device)
    return hidden.masked_fill_(seen, 0)
