"""`FirstMatch` and `ExtendedDrafter`: several drafters draft for one text.

Legend: B rows, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.arguments import check_integer
from specdec.drafters.base import Drafter
from specdec.drafters.check import check_drafter, check_state
from specdec.drafters.lookup import PromptLookupDrafter
from specdec.drafters.settable import OF_LOGITS
from specdec.drafters.verified import Verified
from specdec.drafters.wrapped import context_of, learn_of
from specdec.graphs.tree import shared
from specdec.samplers.noise import Drawing
from specdec.types import PAD_TOKEN, Context, Draft

if TYPE_CHECKING:
    from specdec.targets.prompt_inputs import PromptInputs
    from specdec.targets.target import Target


@dataclass(frozen=True, eq=False)
class JoinedState:
    """The states of all drafters, and how many tokens each of them drafts at most."""

    parts: tuple[Any, ...]
    lengths: tuple[int, ...] = shared()


@dataclass(frozen=True, eq=False)
class _JoinedPrompts:
    """What each drafter reads of prompts that are more than ids."""

    parts: tuple[PromptInputs | None, ...]

    def filled_to(self, batch_size: int) -> _JoinedPrompts:
        """With rows that no drafter reads, as `PromptInputs.filled_to`."""
        return _JoinedPrompts(tuple(part and part.filled_to(batch_size) for part in self.parts))


class _Joined(Drafter):
    """What drafters of chains declare, read and learn together."""

    _not_set = OF_LOGITS

    def __init__(self, *drafters: Drafter):
        super().__init__()
        name = type(self).__name__
        if len(drafters) < 2:
            raise ValueError(f"{name} joins two drafters or more, got {len(drafters)}")
        for drafter in drafters:
            own = type(drafter).__name__
            if not isinstance(drafter, Drafter):
                raise TypeError(
                    f"{name} joins drafters, PromptLookupDrafter() for one, got a {own}"
                )
            check_drafter(drafter)
            depth, number = drafter.tree_depth, drafter.num_draft_tokens
            if depth is not None or number == 0:
                raise ValueError(
                    f"{name} joins drafters of chains of one token or more, got a {own} of "
                    f"tree_depth={depth} and num_draft_tokens={number}"
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
        """The most of the drafters'; K of all is no smaller, so each has its own K + 1 besides."""
        return max(drafter.extra_slots for drafter in self.drafters)

    @property
    def row_inputs(self) -> tuple[str, ...]:
        """The names of all drafters."""
        return tuple(dict.fromkeys(n for drafter in self.drafters for n in drafter.row_inputs))

    def __copy__(self) -> Self:
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

    def read_prompts(self, prompts: PromptInputs, read: Any) -> Any:
        """What each drafter reads."""
        parts = tuple(drafter.read_prompts(prompts, read) for drafter in self.drafters)
        return None if parts.count(None) == len(parts) else _JoinedPrompts(parts)

    def prefill(self, context: Context, state: JoinedState) -> None:
        """Every drafter reads the new tokens, and of prompts that are more what is its own."""
        chunk, count = context.prompt, len(self.drafters)
        parts = (None,) * count if chunk is None else chunk.inputs.parts
        for drafter, part, inputs in zip(self.drafters, state.parts, parts, strict=True):
            prompt = inputs and replace(chunk, inputs=inputs)
            own = context_of(drafter, replace(context, prompt=prompt), self.feature_layers)
            drafter.prefill(own, part)

    def _draft(self, drafter: Drafter, context: Context, state: Any, drawing: Drawing) -> Draft:
        """Of one of the drafters: accepted drafts of the others are new to it."""
        own = context_of(drafter, context, self.feature_layers)
        return drafter.propose(own, state, replace(drawing, is_shared=True))

    def learn(self, verified: Verified, state: JoinedState) -> None:
        """Every drafter that asks learns what became of the draft, whoever proposed it."""
        for drafter, part in zip(self.drafters, state.parts, strict=True):
            learn_of(drafter, verified, part, self.feature_layers, self._widths)


class FirstMatch(_Joined):
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

    def propose(self, context: Context, state: JoinedState, drawing: Drawing) -> Draft:
        """Every drafter drafts; each row takes the first draft that has a token."""
        drafts = []
        for drafter, part, most in zip(self.drafters, state.parts, state.lengths, strict=True):
            told = replace(drawing, num_draft_tokens=min(most, drawing.num_draft_tokens))
            drafts.append(self._draft(drafter, context, part, told))
        return reduce(_first_of, (_padded(draft, drawing.num_draft_tokens) for draft in drafts))


class ExtendedDrafter(_Joined):
    """A drafter, and an n-gram lookup that goes on where its draft ends: the lookup finds the end
    of text and draft together, and adds what followed there.

    A head is right for a few tokens; what then repeats an earlier passage can be long. A row with
    no draft has the lookup's alone. What the lookup adds are point masses, and the first drafter's
    tokens keep the probabilities that they were drawn from; so lossless samplers stay lossless.

    Args:
        first: a drafter of chains, of K1 >= 1 tokens.
        lookup: a `PromptLookupDrafter`, `SuffixDrafter` or another subclass, of chains, of K2 >= 1
            tokens. The next step writes over the drafted tokens in its state.

    Attributes:
        num_draft_tokens: K = K1 + K2. Setting it sets K2. A step of fewer tokens leaves K1 to the
            first drafter where it can.

    Raises:
        TypeError: something else than a drafter and a lookup.
        ValueError: one that drafts trees, or nothing.

    Example:
        >>> from specdec import PromptLookupDrafter, SpeculativeGenerator, zoo
        >>> target = zoo.load_target()
        >>> head, lookup = zoo.load_drafter("eagle3", target), PromptLookupDrafter(4, min_ngram=3)
        >>> SpeculativeGenerator(target, ExtendedDrafter(head, lookup)).drafter.num_draft_tokens
        8

    Reference: asked for in llama.cpp#23184.
    """

    def __init__(self, first: Drafter, lookup: PromptLookupDrafter):
        super().__init__(first, lookup)
        if not isinstance(lookup, PromptLookupDrafter):
            raise TypeError(
                "ExtendedDrafter goes on from a draft by a PromptLookupDrafter, a SuffixDrafter or "
                f"another subclass, since others read more than tokens; got a "
                f"{type(lookup).__name__}"
            )

    @property
    def num_draft_tokens(self) -> int:
        """K, of both together."""
        return sum(drafter.num_draft_tokens for drafter in self.drafters)

    @num_draft_tokens.setter
    def num_draft_tokens(self, number: int) -> None:
        first, lookup = self.drafters
        advice = f"its first drafter drafts {first.num_draft_tokens} of them"
        least = first.num_draft_tokens + 1
        check_integer("ExtendedDrafter.num_draft_tokens", number, least, advice=advice)
        lookup.num_draft_tokens = number - first.num_draft_tokens

    def propose(self, context: Context, state: JoinedState, drawing: Drawing) -> Draft:
        """The first drafter's draft, and what the lookup finds after it."""
        (head, lookup), count = self.drafters, drawing.num_draft_tokens
        first = min(state.lengths[0], count)
        told = replace(drawing, num_draft_tokens=first)
        draft = _padded(self._draft(head, context, state.parts[0], told), count)
        extended = _extended(context, draft, first)
        if first == count:
            lookup.prefill(extended, state.parts[1])
            return draft
        told = replace(drawing, num_draft_tokens=count - first)
        after = _padded(lookup.propose(extended, state.parts[1], told), count)
        index = torch.arange(count, device=draft.tokens.device) - draft.num_valid[:, None]
        tokens = after.tokens.gather(1, index.clamp(min=0))
        after = Draft(tokens, None, draft.num_valid + after.num_valid)
        return _joined(index < 0, draft, after, after.num_valid)


def _extended(context: Context, draft: Draft, most: int) -> Context:
    """A context whose new tokens are followed by those of a draft, at most so many."""
    index = context.num_new[:, None] + 1 + torch.arange(most, device=context.start.device)
    tokens = F.pad(context.tokens, (0, most)).scatter(1, index, draft.tokens[:, :most])
    num_new = context.num_new + draft.num_valid
    return replace(context, tokens=tokens, features=None, num_new=num_new, target=None)


def _padded(draft: Draft, width: int) -> Draft:
    """A chain with a count of each row, and room for `width` tokens."""
    missing, probs = width - draft.tokens.shape[1], draft.probs
    probs = None if probs is None else F.pad(probs, (0, 0, 0, missing))
    raw = None if draft.raw_probs is None else F.pad(draft.raw_probs, (0, missing), value=torch.nan)
    num_valid = draft.is_valid.sum(dim=1) if draft.num_valid is None else draft.num_valid
    tokens = F.pad(draft.tokens, (0, missing), value=PAD_TOKEN)
    return Draft(tokens, probs, num_valid, raw_probs=raw)


def _first_of(first: Draft, other: Draft) -> Draft:
    """By row, the first draft if it has a token, else the other."""
    has_any = first.num_valid > 0
    num_valid = torch.where(has_any, first.num_valid, other.num_valid)
    return _joined(has_any[:, None], first, other, num_valid)


def _joined(is_first: Tensor, first: Draft, other: Draft, num_valid: Tensor) -> Draft:
    """Tokens of the first draft where a mask `[B, 1 or K]` says so, else those of the other. Where
    one of them has probabilities, a deterministic one has point masses, and NaN for `raw_probs`.
    """
    probs, raw = None, None
    known = [draft.probs for draft in (first, other) if draft.probs is not None]
    if known:
        pair = (draft.probs_like(known[0]) for draft in (first, other))
        probs = torch.where(is_first[..., None], *pair)
    own = [torch.nan if draft.raw_probs is None else draft.raw_probs for draft in (first, other)]
    if not all(isinstance(each, float) for each in own):
        raw = torch.where(is_first, *own)
    tokens = torch.where(is_first, first.tokens, other.tokens)
    return Draft(tokens, probs, num_valid, raw_probs=raw)
