"""`StepState`: every tensor that a step reads or writes, allocated before the first step, and
`TokenBuffer`: what every row of it has committed.

Legend: B rows, K draft tokens (nodes of a tree), D depth (K for a chain), S slots, V vocabulary, F
feature width.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.drafters.base import Drafter
from specdec.drafters.check import check_state
from specdec.graphs.tree import copy_from_host, copy_into, fill, map_tensors, parts_of, shared
from specdec.request.call import Request
from specdec.samplers import LogitsFilter, Noise, Sampler
from specdec.slots.cache import SlotCache, narrowed
from specdec.targets import Target
from specdec.targets.text import TargetText
from specdec.types import PAD_TOKEN, Context


def bucket_of_rows(batch_size: int) -> int:
    """Rows that a captured step has for a batch: 1, 2, 4, 8, then multiples of 8.

    Example:
        >>> [bucket_of_rows(n) for n in (1, 3, 8, 9, 20)]
        [1, 4, 8, 16, 24]
    """
    if batch_size > 8:
        return -(-batch_size // 8) * 8
    return 1 << (batch_size - 1).bit_length()


@dataclass(frozen=True)
class Parts:
    """The three parts that a step joins.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), "lookup")
        >>> parts = Parts(generator.target, generator.drafter, generator.sampler)
        >>> parts.target.vocab_size, parts.drafter.num_draft_tokens
        (2048, 8)
    """

    target: Target
    drafter: Drafter
    sampler: Sampler


class Signature(NamedTuple):
    """What of a call decides which operations a step runs; the settings of its parts do, too.
    Capacity is no part of it: empty slots cost a captured step nothing.

    Args:
        batch_size: B, rows that fill up a bucket included.
        num_draft_tokens: K of the drafter.
        tree_depth: D of a drafter of trees, `None` of one of chains.
        logits_filter: which of a filter's values are in use (`LogitsFilter.signature`).
        wants_probs: drafters return probabilities.
        is_captured: steps are to be captured, and so attend over all slots.
        row_inputs: name, shape of a row and data type of each.
        outputs: names of what steps compute of each token that they emit.
        wants_raw: drafters return `Draft.raw_probs`, for a trace.
        extra_slots: of the drafter.
    """

    batch_size: int
    num_draft_tokens: int
    tree_depth: int | None
    logits_filter: tuple
    wants_probs: bool
    is_captured: bool
    row_inputs: tuple = ()
    outputs: tuple[str, ...] = ()
    wants_raw: bool = False
    extra_slots: int = 0

    @property
    def depth(self) -> int:
        """D: tokens of the longest path."""
        return self.num_draft_tokens if self.tree_depth is None else self.tree_depth

    @property
    def num_behind(self) -> int:
        """Slots behind the text: of the root, of a draft, and those that the drafter adds."""
        return self.num_draft_tokens + 1 + self.extra_slots


@dataclass(init=False, eq=False, repr=False)
class TokenBuffer:
    """The committed tokens of a batch: int64 tensors that are allocated once and updated in place.

    How far each row has come stands in `root_position` and nowhere else: `load` sets it and
    `commit` advances it.

    Args:
        batch_size: rows B.
        num_slots: S, the longest text plus K + 1 tokens.
        depth: D, the most draft tokens that a step commits.
        vocab_size: V.
        device: where the tensors live.

    Attributes:
        tokens: `[B, S]` committed tokens; what follows a row's root is garbage.
        root_position: `[B]`; so many tokens have been through the target.
        root: `[B]` the last committed token.
        remaining: `[B]` tokens that each row may still commit; 0 for rows that have ended.
        recent: `[B, D + 2]` the root of the last step and what its sampler emitted.
        num_new: `[B]` tokens that the last step committed.
        longest: upper bound, on the host, of the tokens that a row has committed. `commit` adds the
            most that a step can commit; a replayed graph does not (see `StepState.num_in_use`).

    Example:
        >>> buffer = TokenBuffer(1, 16, depth=2, vocab_size=50)
        >>> buffer.load(torch.tensor([[7, 8, 9]]), [3], max_new_tokens=5, eos=())
        >>> ended = buffer.commit(torch.tensor([[20, 21, PAD_TOKEN]]), torch.tensor([1]))
        >>> buffer.root_position, buffer.root, buffer.recent
        (tensor([4]), tensor([21]), tensor([[ 9, 20, 21, -1]]))
    """

    tokens: Tensor
    root_position: Tensor
    root: Tensor
    remaining: Tensor
    recent: Tensor
    num_new: Tensor
    longest: int
    _room: int
    _offsets: Tensor = shared()
    _ends: Tensor = shared()  # [V + 1]: 0 for tokens that end a row and D + 1 for all others

    def __init__(
        self,
        batch_size: int,
        num_slots: int,
        *,
        depth: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ):
        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        self.tokens = integers(batch_size, num_slots)
        self.recent = integers(batch_size, depth + 2)
        for name in ("root_position", "root", "remaining", "num_new"):
            setattr(self, name, integers(batch_size))
        self._offsets = torch.arange(depth + 2, device=device)
        self._ends = integers(vocab_size + 1)  # the last entry is that of PAD_TOKEN
        self.longest = self._room = 0

    def load(
        self, tokens: Tensor, lengths: list[int], *, max_new_tokens: int, eos: tuple[int, ...]
    ) -> None:
        """Starts over with new prompts. The last token of each is its root, and to the drafter it
        is newly committed.

        Args:
            tokens: `[B, T]` prompts from column 0 on; what follows a row's last token is ignored.
            lengths: tokens of each prompt, >= 1.
            max_new_tokens: that each row may commit.
            eos: ids that end a row.
        """
        self.tokens.fill_(PAD_TOKEN)
        mine = [self.tokens[:, : tokens.shape[1]], self.root_position]
        copy_from_host(mine, [tokens, torch.tensor(lengths, device="cpu") - 1])
        self.longest = max(lengths)
        self._room = self.longest + max_new_tokens
        self.remaining.fill_(max_new_tokens)
        torch.clamp(self.root_position, max=1, out=self.num_new)
        torch.gather(self.tokens, 1, self.root_position[:, None], out=self.root[:, None])
        torch.gather(self.tokens, 1, self.start[:, None] + self._offsets, out=self.recent)
        self._ends.fill_(len(self._offsets) - 1)
        for token in eos:
            if 0 <= token < len(self._ends) - 1:
                self._ends[token].zero_()

    def commit(self, tokens: Tensor, num_accepted: Tensor) -> Tensor:
        """Appends what a sampler emitted, cut where the row ends.

        Args:
            tokens: `[B, n + 1]` emitted tokens after a draft of depth n <= D, padded with
                `PAD_TOKEN`.
            num_accepted: `[B]`, one less than were emitted.

        Returns:
            `[B]` bool: the row ended with an end-of-sequence token in this step.
        """
        width = tokens.shape[1]
        offsets = self._offsets[: width + 1]
        first_end = (self._ends.take(tokens) + offsets[:-1]).amin(dim=1)  # [B]
        num_kept = torch.minimum(num_accepted + 1, self.remaining)
        is_eos = first_end < num_kept
        self.tokens.scatter_(1, self.root_position[:, None] + offsets[1:], tokens)
        torch.cat([self.root[:, None], tokens], dim=1, out=self.recent[:, : width + 1])
        torch.minimum(num_kept, first_end + 1, out=self.num_new)
        self.root_position += self.num_new
        torch.gather(self.recent, 1, self.num_new[:, None], out=self.root[:, None])
        self.remaining -= self.num_new
        self.remaining.masked_fill_(is_eos, 0)
        self.note_longest(self.longest + width)
        return is_eos

    @property
    def start(self) -> Tensor:
        """`[B]` position of the root of the last step."""
        return self.root_position - self.num_new

    def note_longest(self, longest: int) -> None:
        """Sets the bound of the longest row, for instance from outcomes that the host has read."""
        self.longest = min(longest, self._room)


@dataclass(frozen=True, eq=False)
class StepState:
    """The device side of a batch. `load` writes a new call into the same tensors, so that their
    addresses are the same for all calls that fit into them.

    Args:
        signature: of the calls that are loaded into it.
        vocab_size: V of the target.
        buffer: committed tokens and lengths.
        logits_filter: how the rows' logits become probabilities.
        noise: the rows' random numbers.
        cache: the target's keys and values.
        drafter_state: the drafter's own.
        features: `[B, D + 1, F]` of the tokens before those of the last step, or `None`.
        chunk_start: `[]` position of the first token of the prompt chunk that is read next.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), "lookup")
        >>> state = generator.start(torch.tensor([[5, 6, 7]]), max_new_tokens=4).state
        >>> state.buffer.root_position, state.buffer.root, state.buffer.remaining
        (tensor([2]), tensor([7]), tensor([4]))
    """

    signature: Signature
    vocab_size: int
    buffer: TokenBuffer
    logits_filter: LogitsFilter
    noise: Noise
    cache: SlotCache
    drafter_state: Any
    features: Tensor | None
    chunk_start: Tensor = shared()

    @classmethod
    def allocate(
        cls, signature: Signature, num_slots: int, parts: Parts, request: Request
    ) -> StepState:
        """Tensors for calls like the given one that need at most `num_slots` slots; `load` has to
        follow.
        """
        rows, depth, target = signature.batch_size, signature.depth, parts.target
        device, drafter, request = target.device, parts.drafter, request.filled_to(rows)
        sizes = {"vocab_size": target.vocab_size, "device": device}
        drafter_state = check_state(drafter, rows, num_slots, **sizes)
        features = None
        if target.feature_width:
            shape = rows, depth + 1, target.feature_width
            features = torch.zeros(shape, dtype=target.dtype, device=device)
        options = {"max_window": drafter.num_draft_tokens + 1, "extra_slots": signature.extra_slots}
        cache = target.init_cache(rows, num_slots, **options)
        cache.row_inputs = map_tensors(
            partial(torch.zeros_like, device=device), _inputs_of(request)
        )
        return cls(
            signature=signature,
            vocab_size=target.vocab_size,
            buffer=TokenBuffer(rows, num_slots, depth=depth, **sizes),
            logits_filter=LogitsFilter(rows, device=device, **request.logits_filter),
            noise=parts.sampler.noise_type([0] * rows, device=device),
            cache=cache,
            drafter_state=drafter_state,
            features=features,
            chunk_start=torch.zeros((), dtype=torch.long, device=device),
        )

    def with_options(self, signature: Signature, logits_filter: LogitsFilter) -> StepState:
        """The same tensors for calls of another signature, with the filter of these calls."""
        return replace(self, signature=signature, logits_filter=logits_filter)

    @property
    def device(self) -> torch.device:
        """Where steps run."""
        return self.buffer.tokens.device

    def load(self, request: Request) -> None:
        """Writes a call of the state's signature into its tensors. Where it has fewer rows than the
        state, the others are inert: they have ended, so they commit nothing.
        """
        filled = request.filled_to(self.signature.batch_size)
        rows = len(filled.lengths)
        self.buffer.load(
            filled.tokens,
            filled.lengths,
            max_new_tokens=filled.max_new_tokens,
            eos=filled.eos,
        )
        self.buffer.remaining[len(request.lengths) :] = 0
        values = (
            LogitsFilter(rows, **filled.logits_filter),
            type(self.noise)(filled.seeds or [0] * rows),
        )
        # A masked slot has weight 0, but a NaN that a broken model left there would still be one.
        fill((self.cache, self.drafter_state, self.features), 0)
        mine = self.logits_filter, self.noise, self.cache.row_inputs
        copy_into(mine, (*values, _inputs_of(filled)))
        if hasattr(request.row_inputs, "source"):
            request.row_inputs.write(self.cache.row_inputs)

    @property
    def num_in_use(self) -> int:
        """Slots that the next step uses: all that the longest row may have committed, as far as the
        host knows, and K more. Captured steps attend over all slots, since a replay runs no code of
        the host that could count.
        """
        if self.signature.is_captured:
            return self.cache.num_slots
        return self.buffer.longest + self.signature.num_draft_tokens

    @cached_property
    def _caches(self) -> list[SlotCache]:
        return list(parts_of((self.cache, self.drafter_state), SlotCache))

    def narrowed(self, num_in_use: int) -> AbstractContextManager[None]:
        """Lets the target's cache and those of the drafter attend over so many slots only, in one
        step or chunk; see `specdec.slots.cache.narrowed`.
        """
        return narrowed(self._caches, num_in_use)

    def context(self, parts: Parts) -> Context:
        """The drafter's input at the start of a step: tokens, features, positions, and the target's
        keys and values where it reads them.
        """
        buffer = self.buffer
        known = buffer.recent, self.features, buffer.start, buffer.num_new
        return self.context_of(parts, *known, num_read=buffer.root_position)

    def context_of(self, parts: Parts, *known: Tensor | None, num_read: Tensor) -> Context:
        """A context of these tokens, features, starts and counts, where the target has read the
        first `num_read` `[B]` tokens of each row.
        """
        text, own = self.text(parts, num_read), self.cache.row_inputs
        return Context(*known, target=text, row_inputs=own)

    def text(self, parts: Parts, lengths: Tensor) -> TargetText | None:
        """What the target has of the first `lengths` `[B]` tokens of each row, where the drafter
        reads it.
        """
        if not parts.drafter.reads_target:
            return None
        return TargetText(parts.target, self.cache, lengths, room=self.signature.num_behind)


def _inputs_of(request: Request) -> dict[str, Tensor]:
    """What windows say of the rows of a call, on the host; see `SlotCache`."""
    ends = torch.tensor(request.lengths, device="cpu") - 1
    own = request.step_inputs
    return {**own, "prompt_end": ends + own.get("position_offset", 0)}
