"""`PromptLookupDrafter`: the text so far drafts for itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.arguments import check_integer
from specdec.drafters.base import Drafter, check_num_draft_tokens
from specdec.drafters.settable import OF_LOGITS
from specdec.hf.special_ids import placeholders
from specdec.samplers.noise import Drawing
from specdec.slots.cache import SlotCache
from specdec.types import PAD_TOKEN, Context, Draft

if TYPE_CHECKING:
    from specdec.targets import Target


@dataclass(frozen=True, eq=False)
class PromptLookupState:
    """`[B, S + 1]` committed tokens, position by position, and which of these slots are in use: a
    cache without layers, that the loop narrows as it does others.
    """

    tokens: Tensor
    slots: SlotCache

    @property
    def text(self) -> Tensor:
        """`[B, T]` tokens of the slots in use."""
        return self.tokens[:, : self.slots.in_use]


SKIPPED = PAD_TOKEN - 2
"""In the place of an id that stands for a picture, and below it in those of others."""


class PromptLookupDrafter(Drafter):
    """Finds the longest n-gram that ends the text and occurred before, and proposes what followed
    it then.

    Among the occurrences of the longest matching n-gram, one that has K tokens after it is
    preferred, and of those the latest. A row proposes fewer than K tokens when the text after its
    match is shorter, and none without a match. The proposal is deterministic: a point mass. With
    several continuations the draft is a tree: what followed the best of these occurrences, each
    K / c tokens long, common beginnings once. Ids that stand for pictures and sound match nothing.

    Args:
        num_draft_tokens: K.
        max_ngram: longest n-gram to look for, in tokens.
        min_ngram: shortest match worth proposing from.
        num_continuations: c, by which K is divided.

    Raises:
        TypeError: a number that is no integer.
        ValueError: K < 0, not 1 <= min_ngram <= max_ngram, or a K that c does not divide.

    Example:
        >>> drafter = PromptLookupDrafter(num_draft_tokens=2)
        >>> state = drafter.init_state(1, 16, vocab_size=10, device=torch.device("cpu"))
        >>> text = torch.tensor([[5, 6, 7, 8, 5, 6]])
        >>> context = Context(text, None, torch.tensor([0]), torch.tensor([5]))
        >>> drafter.propose(context, state, Drawing(2, None, None, None)).tokens
        tensor([[7, 8]])

    Reference: A. Saxena, "Prompt Lookup Decoding" (2023),
    github.com/apoorvumang/prompt-lookup-decoding.
    """

    _not_set = OF_LOGITS
    _set_once = ("num_continuations",)

    def __init__(
        self,
        num_draft_tokens: int = 8,
        *,
        max_ngram: int = 3,
        min_ngram: int = 1,
        num_continuations: int = 1,
    ):
        super().__init__()
        self._skipped: tuple[int, ...] = ()
        self.num_draft_tokens = check_num_draft_tokens(num_draft_tokens)
        self.max_ngram = check_integer("max_ngram", max_ngram, 1)
        advice = "max_ngram is the largest"
        self.min_ngram = check_integer("min_ngram", min_ngram, 1, max_ngram, advice=advice)
        self.num_continuations = check_integer("num_continuations", num_continuations, 1)
        if num_draft_tokens % num_continuations:
            raise ValueError(
                f"num_draft_tokens={num_draft_tokens} must be a multiple of num_continuations="
                f"{num_continuations}: each is so many of them long"
            )
        if num_continuations > 1:
            self.tree_depth = num_draft_tokens // num_continuations

    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """Fits every target: it has no weights. Raises ValueError for more nodes than its
        continuations have.
        """
        if self.tree_depth is not None:
            most, advice = self.num_continuations * self.tree_depth, "make a new one for more"
            check_integer("num_draft_tokens", self.num_draft_tokens, 0, most, advice=advice)

    def check_target(self, target: Target) -> None:
        """Notes which ids stand for pictures and sound: what they stand for is not the same twice,
        so nothing is matched across them, and none is drafted.
        """
        super().check_target(target)
        self._skipped = placeholders(target.model)

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> PromptLookupState:
        """Room for `max_length` tokens per row and one to forget."""
        slots = SlotCache(batch_size, max_length, {}, extra_slots=0)
        shape = batch_size, slots.num_slots + 1
        return PromptLookupState(torch.zeros(shape, dtype=torch.long, device=device), slots)

    def prefill(self, context: Context, state: PromptLookupState) -> None:
        """Remembers the root and the new tokens."""
        tokens = context.tokens
        for index, token in enumerate(self._skipped):
            tokens = tokens.masked_fill(tokens == token, SKIPPED - index)
        remember(context, tokens, state.tokens)

    def _as_passed(self, text: Tensor) -> Tensor:
        """With the ids that stand for pictures."""
        for index, token in enumerate(self._skipped):
            text = text.masked_fill(text == SKIPPED - index, token)
        return text

    def propose(self, context: Context, state: PromptLookupState, drawing: Drawing) -> Draft:
        """Looks the end of the text up in the text."""
        self.prefill(context, state)
        return self.look_up(state.text, context.num_committed[:, None], drawing)

    def look_up(self, text: Tensor, length: Tensor, drawing: Drawing) -> Draft:
        """Looks the end of texts `[B, T]` of lengths `[B, 1]` up in them."""
        count = drawing.num_draft_tokens if self.tree_depth is None else self.tree_depth
        score, follow = self._scores(text, length, count)
        if self.tree_depth is not None:
            from specdec.drafters.lookup_tree import tree_of

            most = self.num_continuations
            found, best = score.topk(min(4 * most, score.shape[1]))
            tokens = following(text, length, best, count)  # [B, m, D]
            return tree_of(tokens, found, most, drawing.num_draft_tokens)
        found, best = score.max(dim=1, keepdim=True)
        num_valid = torch.where(found >= 0, follow.gather(1, best), 0)
        tokens = following(text, length, best, count)[:, 0]
        is_valid = torch.arange(count, device=text.device) < num_valid
        return Draft(torch.where(is_valid, tokens, PAD_TOKEN), None, num_valid[:, 0])

    def _scores(self, text: Tensor, length: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """`[B, T]` each: how good a match is that ends at a position, -1 for none, and how many
        tokens follow, at most `count`. The best is the longest, then that with the most tokens
        after it, then the latest; its length is its score // ((count + 1) * T).
        """
        matched = self._matched(text, length)
        ends = torch.arange(text.shape[1], device=text.device)  # position of a match's last token
        follow = (length - 1 - ends).clamp(0, count)  # tokens known after it
        score = (matched * (count + 1) + follow) * text.shape[1] + ends
        return torch.where((matched >= self.min_ngram) & (follow > 0), score, -1), follow

    def _matched(self, text: Tensor, length: Tensor) -> Tensor:
        """`[B, T]`: how many tokens up to and including each position equal the end of the text."""
        wanted = last_tokens(text, length, self.max_ngram)
        windows = F.pad(text, (self.max_ngram - 1, 0), value=PAD_TOKEN).unfold(1, self.max_ngram, 1)
        is_equal = ((windows == wanted[:, None]) & (wanted[:, None] >= 0)).flip(2)
        return is_equal.cumprod(2, dtype=torch.uint8).sum(2)


def remember(context: Context, tokens: Tensor, table: Tensor) -> None:
    """Writes the tokens `[B, N + 1]` of a context at their positions in a table `[B, S + 1]`; those
    that belong to no row at its end.
    """
    offsets = torch.arange(tokens.shape[1], device=tokens.device)
    is_real = offsets <= context.num_new[:, None]
    slots = (context.start[:, None] + offsets).where(is_real, table.shape[1] - 1)
    table.scatter_(1, slots, tokens)


def last_tokens(text: Tensor, length: Tensor, count: int) -> Tensor:
    """`[B, count]`: the last tokens of texts `[B, T]`, the last one last; an id that no token has
    where a text is shorter.
    """
    index = length - count + torch.arange(count, device=text.device)
    return text.gather(1, index.clamp(min=0)).masked_fill(index < 0, PAD_TOKEN - 1)


def following(text: Tensor, length: Tensor, ends: Tensor, count: int, *, fill: int = 0) -> Tensor:
    """`[B, m, count]`: what follows positions `[B, m]` of texts `[B, T]`; `fill` at their ends, and
    from a picture on.
    """
    source = (ends[..., None] + 1 + torch.arange(count, device=text.device)).flatten(1)
    tokens = text.gather(1, source.clamp(max=text.shape[1] - 1))
    tokens = torch.where(source < length, tokens, fill).unflatten(1, (ends.shape[1], count))
    is_drafted = (tokens > SKIPPED).cumprod(dim=2) > 0
    return torch.where(is_drafted, tokens, fill)
