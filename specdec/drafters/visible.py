"""What of a text a drafter sees: `Sinks(4) + Recent(1024)`, `Recent(64) + TopSlots(512)`.

Legend: B rows, W slots of a table, h heads of keys, S slots of the target's cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.arguments import check_integer, shown
from specdec.slots.spans import Chunk, Near

if TYPE_CHECKING:
    from specdec.targets.route import Route


@dataclass(frozen=True)
class Visible:
    """So many tokens of a text; all of it, while the text is no longer than these together.

    A `SelfDrafter` sees them and its draft. In a cache of the drafter's own each token sees them:
    the last ones are itself and those before it.

    Args:
        sinks: the first ones, on which attention rests whatever they are (arXiv:2309.17453).
        top: those between that got the most attention from the last token that was verified, layer
            by layer and head by head (of keys); a `SelfDrafter` has these.
        recent: the last ones.

    Example:
        >>> seen = Sinks(1) + Recent(3)
        >>> seen.slots(torch.tensor([2, 9]), 5)
        tensor([[0, 1, 0, 0, 0],
                [0, 6, 7, 8, 0]])
    """

    sinks: int = 0
    top: int = 0
    recent: int = 0

    def __post_init__(self):
        for name in ("sinks", "top", "recent"):
            check_integer(name, getattr(self, name), 0)
        if not self.count:
            raise ValueError("a drafter needs to see something of the text; Recent(1024) is usual")

    def __add__(self, other: Visible) -> Visible:
        """What either sees."""
        if not isinstance(other, Visible):
            return NotImplemented
        for rule in (self, other):
            if rule.has_own_rule:
                raise TypeError(
                    "expected Sinks, Recent and TopSlots in a sum, got "
                    f"{type(rule).__name__} with a rule of its own, which a sum would lose; write "
                    "one class that does what both do"
                )
        sums = self.sinks + other.sinks, self.top + other.top, self.recent + other.recent
        return Visible(*sums)

    @property
    def has_own_rule(self) -> bool:
        """A subclass decides which tokens are seen."""
        names = "count", "slots", "top_slots"
        return any(getattr(type(self), n) is not getattr(Visible, n) for n in names)

    @property
    def count(self) -> int:
        """The most tokens that are seen."""
        return self.sinks + self.top + self.recent

    def slots(self, lengths: Tensor, width: int, top: Tensor | None = None) -> Tensor:
        """Where the tokens are that are seen, in order.

        Args:
            lengths: `[B]` int64, tokens of each text.
            width: W; what lies beyond the tokens that are seen is slot 0.
            top: `[B, h, top]` int64, of `top_slots`; without it they are recent ones.

        Returns:
            `[B, W]` int64, with `top` `[B, W, h]`.
        """
        index = torch.arange(width, device=lengths.device)
        num_hidden = (lengths - self.count).clamp(min=0)[:, None]
        slots = torch.where(index < self.sinks, index, index + num_hidden)
        slots = slots.where(index < lengths.clamp(max=self.count)[:, None], 0)
        if top is None:
            return slots
        last = self.sinks + self.top
        is_top = (index >= self.sinks) & (index < last) & (num_hidden > 0)  # [B, W]
        padded = F.pad(top.transpose(1, 2), (0, 0, self.sinks, width - last))
        return torch.where(is_top[..., None], padded, slots[..., None])

    def top_slots(self, scores: Tensor, lengths: Tensor) -> Tensor:
        """`[B, h, top]` int64, between sinks and recent ones the slots of the highest `scores`
        `[B, h, S]`; anything for a text of which all is seen.
        """
        index = torch.arange(scores.shape[2], device=scores.device)
        first_recent = (lengths - self.recent)[:, None]
        is_between = (index >= self.sinks) & (index < first_recent)  # [B, S]
        scores = scores.masked_fill(~is_between[:, None], -torch.inf)
        return scores.topk(self.top, dim=2, sorted=False).indices


class Sinks(Visible):
    """The first tokens of a text.

    Example:
        >>> Sinks(4) + Recent(1024)
        Visible(sinks=4, top=0, recent=1024)
    """

    def __init__(self, count: int):
        super().__init__(sinks=count)


class Recent(Visible):
    """The last tokens of a text.

    Example:
        >>> Recent(3).slots(torch.tensor([5]), 4)
        tensor([[2, 3, 4, 0]])
    """

    def __init__(self, count: int):
        super().__init__(recent=count)


class TopSlots(Visible):
    """Tokens of a text that the last verified token attended to the most.

    Example:
        >>> scores = torch.tensor([[[0.1, 0.6, 0.2, 0.1]]])  # [B, h, S]
        >>> (TopSlots(1) + Recent(2)).top_slots(scores, torch.tensor([4]))
        tensor([[[1]]])
    """

    def __init__(self, count: int):
        super().__init__(top=count)


def draft_cache(count: int) -> Visible:
    """So many visible tokens in all: four sinks, and recent ones.

    Example:
        >>> draft_cache(1024)
        Visible(sinks=4, top=0, recent=1020)
    """
    return Sinks(4) + Recent(check_integer("the draft cache", count, 5) - 4)


def visible_of(shown: Visible | str | None) -> Visible | None:
    """What is visible as users write it in commands and studies: "4+508" for `Sinks(4) +
    Recent(508)`, "512" for `Recent(512)`, "all" for `None`.

    Raises:
        ValueError: another text.

    Example:
        >>> visible_of("4+508")
        Visible(sinks=4, top=0, recent=508)
    """
    if not isinstance(shown, str):
        return shown
    sizes = shown.split("+")
    if shown != "all" and (len(sizes) > 2 or not all(size.isdecimal() for size in sizes)):
        raise ValueError(
            'visible must be like "4+508", the first 4 and the last 508 tokens, "512", the last '
            f'512, or "all", got {shown!r}'
        )
    return None if shown == "all" else Visible(*map(int, sizes[:-1]), recent=int(sizes[-1]))


def attention_scores(query: Tensor, keys: Tensor, lengths: Tensor) -> Tensor:
    """How much attention one query of each row pays to each slot, by head of keys.

    Rows are multiplied one after the other: keys of one row are a matrix per head as they lie, and
    a product over all rows would copy them first.

    Args:
        query: `[B, Hq, D]`, scaled.
        keys: `[B, h, S, D]`, as the cache has them; what is beyond `lengths` `[B]` is not seen.

    Returns:
        `[B, h, S]` float32, sums over the query heads of a head of keys.
    """
    grouped = query.unflatten(1, (keys.shape[1], -1))  # [B, h, G, D]
    pairs = zip(grouped.to(keys.dtype), keys, strict=True)
    scores = torch.stack([torch.bmm(q, k.transpose(1, 2)) for q, k in pairs])
    is_text = torch.arange(keys.shape[2], device=keys.device) < lengths[:, None]
    scores = scores.masked_fill(~is_text[:, None, None], -torch.inf)
    return scores.softmax(dim=-1, dtype=torch.float32).sum(dim=2)


def check_visible(visible: Visible) -> None:
    """Raises `TypeError` for anything else."""
    if not isinstance(visible, Visible):
        raise TypeError(f"visible must be like Sinks(4) + Recent(1024), got {shown(visible)}")


def near_of(visible: Visible) -> Near:
    """What each token sees of the keys and values that a drafter stores for itself: its own, those
    of the last tokens before it, and those of the first tokens.

    Raises:
        TypeError, ValueError: no sinks and recent ones alone.

    Example:
        >>> near_of(Sinks(4) + Recent(1024))
        Near(recent=1024, sinks=4)
    """
    check_visible(visible)
    if visible.top or visible.has_own_rule:
        what = "TopSlots" if visible.top else f"the rule of {type(visible).__name__}"
        raise ValueError(
            f"a drafter with keys and values of its own takes Sinks and Recent, got {what}; write "
            "Sinks(4) + Recent(1024), or let the target draft with SelfDrafter(target, visible=)"
        )
    if not visible.recent:
        raise ValueError("a token of a drafter's own text sees itself; add Recent(1024)")
    return Near(visible.recent, visible.sinks)


def check_layers(route: Route, name: str, advice: str) -> None:
    """Raises `ValueError` if layers of a model of this name cannot be shown a part of a text."""
    what = "read entries of several tokens" if route.compressors else None
    if any(isinstance(window, Chunk) for window in route.layer_windows.values()):
        what = "attend by chunks"
    if what is not None:
        raise ValueError(f"layers of {name} {what}, of which no part can be shown; {advice}")
