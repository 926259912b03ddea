"""`FirstMatch`: several drafters take turns, row by row.

Legend: B rows, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from specdec.arguments import check_integer
from specdec.drafters.base import Drafter
from specdec.drafters.check import check_drafter, check_state
from specdec.drafters.wrapped import context_of, learn_of
from specdec.graphs.tree import shared
from specdec.samplers.noise import Drawing
from specdec.types import PAD_TOKEN, Context, Draft, Verified

if TYPE_CHECKING:
    from specdec.targets.target import Target


@dataclass(frozen=True, eq=False)
class JoinedState:
    """The states of all drafters, and how many tokens each of them drafts at most."""

    parts: tuple[Any, ...]
    lengths: tuple[int, ...] = shared()


class FirstMatch(Drafter):
    """A row takes the draft of the first drafter that proposes a token for it: an n-gram's
    continuation where there is one, else a head's draft.

    All drafters run in every step, since a step has one shape and decides nothing on the host, and
    since each has to read what was committed. A step costs the sum of their proposals. Which
    drafter a row takes depends on its committed text alone, and the draft has the probabilities
    that its tokens were drawn from, a one-hot row where they come from a deterministic proposal; so
    lossless samplers stay lossless.

    A first drafter that nearly always has a token leaves the others nothing: give an n-gram
    drafter a `min_ngram` of 3 or more.

    Args:
        drafters: two or more, of chains, each with a K >= 1 of its own. K of all is the largest; a
            drafter with fewer proposes its own. Setting `num_draft_tokens` sets that of each.

    Raises:
        TypeError: something else than a drafter.
        ValueError: fewer than two; one that drafts trees; one that drafts nothing.

    Example:
        >>> from specdec import PromptLookupDrafter, SpeculativeGenerator, zoo
        >>> target = zoo.load_target()
        >>> lookup, head = PromptLookupDrafter(6, min_ngram=3), zoo.load_drafter("eagle3", target)
        >>> SpeculativeGenerator(target, FirstMatch(lookup, head)).drafter.num_draft_tokens
        6

    Reference: the order of vllm#18633 and vllm#24344, there of n-gram lookup and EAGLE.
    """

    def __init__(self, *drafters: Drafter):
        super().__init__()
        if len(drafters) < 2:
            raise ValueError(f"FirstMatch joins two drafters or more, got {len(drafters)}")
        for drafter in drafters:
            name = type(drafter).__name__
            if not isinstance(drafter, Drafter):
                raise TypeError(
                    f"FirstMatch joins drafters, PromptLookupDrafter() for one, got a {name}"
                )
            check_drafter(drafter)
            depth, number = drafter.tree_depth, drafter.num_draft_tokens
            if depth is not None or number == 0:
                raise ValueError(
                    "FirstMatch joins drafters of chains of one token or more, got a "
                    f"{name} of tree_depth={depth} and num_draft_tokens={number}"
                )
        self.drafters = nn.ModuleList(drafters)
        layers = (layer for drafter in drafters for layer in drafter.feature_layers)
        self.feature_layers = tuple(dict.fromkeys(layers))
        self.has_memory = any(drafter.has_memory for drafter in drafters)
        self._widths: list[int] | None = None  # of the features of each layer

    @property
    def reads_target(self) -> bool:
        """Whether one of the drafters does."""
        return any(drafter.reads_target for drafter in self.drafters)

    @property
    def reads_outcome(self) -> bool:
        """Whether one of the drafters does."""
        return any(drafter.reads_outcome for drafter in self.drafters)

    @property
    def extra_slots(self) -> int:
        """The most of the drafters'; K of all is the largest, so each has its own K + 1 besides."""
        return max(drafter.extra_slots for drafter in self.drafters)

    @property
    def row_inputs(self) -> tuple[str, ...]:
        """The names of all drafters."""
        return tuple(dict.fromkeys(n for drafter in self.drafters for n in drafter.row_inputs))

    @property
    def num_draft_tokens(self) -> int:
        """K, the largest of the drafters'."""
        return max(drafter.num_draft_tokens for drafter in self.drafters)

    @num_draft_tokens.setter
    def num_draft_tokens(self, number: int) -> None:
        advice = "each of its drafters drafts one token or more"
        check_integer("FirstMatch.num_draft_tokens", number, 1, advice=advice)
        for drafter in self.drafters:
            drafter.num_draft_tokens = number

    def __copy__(self) -> FirstMatch:
        """Over the same weights, with sizes of its own: of copies of the drafters."""
        return type(self)(*map(copy, self.drafters))

    def settings(self) -> dict[str, Any]:
        """See `Drafter.settings`; with those of each drafter."""
        return {**super().settings(), "drafters": [d.settings() for d in self.drafters]}

    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """Raises the error that any of the drafters raises."""
        for drafter in self.drafters:
            drafter.validate(vocab_size=vocab_size, device=device)

    def check_target(self, target: Target) -> None:
        """Raises the error that any of the drafters raises."""
        for drafter in self.drafters:
            drafter.check_target(target)
        self._widths = target.feature_widths(self.feature_layers)

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> JoinedState:
        """The states of all drafters."""
        sizes = {"vocab_size": vocab_size, "device": device}
        parts = [check_state(d, batch_size, max_length, **sizes) for d in self.drafters]
        return JoinedState(tuple(parts), tuple(d.num_draft_tokens for d in self.drafters))

    def prefill(self, context: Context, state: JoinedState) -> None:
        """Every drafter reads the new tokens."""
        for drafter, part in zip(self.drafters, state.parts, strict=True):
            drafter.prefill(context_of(drafter, context, self.feature_layers), part)

    def propose(self, context: Context, state: JoinedState, drawing: Drawing) -> Draft:
        """Every drafter drafts; each row takes the first draft that has a token."""
        drafts = []
        for drafter, part, most in zip(self.drafters, state.parts, state.lengths, strict=True):
            count = min(most, drawing.num_draft_tokens)
            told = replace(drawing, num_draft_tokens=count, is_shared=True)
            own = context_of(drafter, context, self.feature_layers)
            drafts.append(drafter.propose(own, part, told))
        return reduce(_first_of, (_padded(draft, drawing.num_draft_tokens) for draft in drafts))

    def learn(self, verified: Verified, state: JoinedState) -> None:
        """Every drafter that asks learns what became of the draft, whoever proposed it."""
        for drafter, part in zip(self.drafters, state.parts, strict=True):
            learn_of(drafter, verified, part, self.feature_layers, self._widths)


def _padded(draft: Draft, width: int) -> Draft:
    """A chain with a count of each row, and room for `width` tokens."""
    missing, probs = width - draft.tokens.shape[1], draft.probs
    probs = None if probs is None else F.pad(probs, (0, 0, 0, missing))
    raw = None if draft.raw_probs is None else F.pad(draft.raw_probs, (0, missing), value=torch.nan)
    num_valid = draft.is_valid.sum(dim=1) if draft.num_valid is None else draft.num_valid
    tokens = F.pad(draft.tokens, (0, missing), value=PAD_TOKEN)
    return Draft(tokens, probs, num_valid, raw_probs=raw)


def _first_of(first: Draft, other: Draft) -> Draft:
    """By row, the first draft if it has a token, else the other. Where one of them has
    probabilities, a deterministic one has point masses, and NaN for `raw_probs`.
    """
    has_any, probs, raw = first.num_valid > 0, None, None
    known = [draft.probs for draft in (first, other) if draft.probs is not None]
    if known:
        pair = (draft.probs_like(known[0]) for draft in (first, other))
        probs = torch.where(has_any[:, None, None], *pair)
    own = [torch.nan if draft.raw_probs is None else draft.raw_probs for draft in (first, other)]
    if not all(isinstance(each, float) for each in own):
        raw = torch.where(has_any[:, None], *own)
    tokens = torch.where(has_any[:, None], first.tokens, other.tokens)
    num_valid = torch.where(has_any, first.num_valid, other.num_valid)
    return Draft(tokens, probs, num_valid, raw_probs=raw)
