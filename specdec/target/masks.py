"""Which keys each query attends to: predicates over slots, composed, and written out as additive
masks or as what `ragged_attention` needs.

A predicate takes the slots of queries and of keys, two int64 tensors that broadcast against each
other, and returns the bool tensor of what is visible.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.kernels import AttentionOptions

Visible = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Predicate:
    """A predicate of which is known what it shows of the slots before a window, so that attention
    needs no dense mask. Any other function of slots will do where a mask is made.

    Args:
        visible: the predicate.
        sliding_window: of the slots before the first of its window a token sees those after `its
            own slot - sliding_window`: none if it is 0, all if it is `None`.
        is_causal: whether this, and that no token sees a later one, is all.
    """

    visible: Visible
    sliding_window: int | None = None
    is_causal: bool = False

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """What is visible."""
        return self.visible(queries, keys)


def _not_after(queries: Tensor, keys: Tensor) -> Tensor:
    return keys <= queries


causal = Predicate(_not_after, is_causal=True)
"""A token sees itself and what comes before it."""


def within(sliding_window: int) -> Predicate:
    """A token sees slots at most `sliding_window - 1` before its own."""

    def visible(queries: Tensor, keys: Tensor) -> Tensor:
        return keys > queries - sliding_window

    return Predicate(visible, sliding_window)


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

    if not all(isinstance(predicate, Predicate) for predicate in predicates):
        return visible
    windows = [p.sliding_window for p in predicates if p.sliding_window is not None]
    return Predicate(visible, min(windows, default=None))


def block(first: Tensor, last: Tensor) -> Predicate:
    """The tokens of a row's block, slots `first` to `last` (`[B]` each) of one window, see each
    other. For masks of queries `[B, 1, N]`.
    """
    first, last = first[:, None, None, None], last[:, None, None, None]

    def visible(queries: Tensor, keys: Tensor) -> Tensor:
        return (queries >= first) & (queries <= last) & (keys >= first) & (keys <= last)

    return Predicate(visible, sliding_window=0)


def any_of(*predicates: Visible) -> Visible:
    """What some predicate lets a token see."""

    def visible(queries: Tensor, keys: Tensor) -> Tensor:
        seen = predicates[0](queries, keys)
        for predicate in predicates[1:]:
            seen = seen | predicate(queries, keys)
        return seen

    if not all(isinstance(predicate, Predicate) for predicate in predicates):
        return visible
    windows = [predicate.sliding_window for predicate in predicates]
    return Predicate(visible, None if None in windows else max(windows))


def causal_within(sliding_window: int | None) -> Predicate:
    """`causal`, and `within` a sliding window if there is one."""
    if sliding_window is None:
        return causal
    return replace(all_of(causal, within(sliding_window)), is_causal=True)


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


def window_options(slots: Tensor, visible: Visible) -> AttentionOptions | None:
    """A predicate as `ragged_attention` takes it.

    Args:
        slots: `[B, N]` int64, slots of the queries: of each row N that follow each other, those of
            tokens to forget excepted.
        visible: who sees whom.

    Returns:
        Sliding window and mask of the window's own slots; `None` if nothing is known of what the
        predicate shows before the window.

    Example:
        >>> window_options(torch.tensor([[4, 5]]), causal_within(3)).sliding_window
        3
        >>> both = block(torch.tensor([4]), torch.tensor([5]))
        >>> window_options(torch.tensor([[4, 5]]), any_of(causal, both)).window_visible
        tensor([[[True, True],
                 [True, True]]])
    """
    if not isinstance(visible, Predicate):
        return None
    if visible.is_causal:
        return AttentionOptions(sliding_window=visible.sliding_window)
    offsets = torch.arange(slots.shape[1], device=slots.device)
    own = slots.amin(dim=1, keepdim=True) + offsets  # [B, N]
    seen = visible(slots[:, None, :, None], own[:, None, None])[:, 0]
    seen = seen.expand(-1, slots.shape[1], slots.shape[1])
    return AttentionOptions(sliding_window=visible.sliding_window, window_visible=seen)
