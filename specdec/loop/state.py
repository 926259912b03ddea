"""`StepState`: every tensor that a step reads or writes, allocated before the first step.

Legend: B rows, K draft tokens, S slots, F feature width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.drafters.base import Drafter, check_state
from specdec.graphs.tree import owned_tensors
from specdec.loop.token_buffer import TokenBuffer
from specdec.request.call import Request
from specdec.samplers import Noise, Sampler, Warp
from specdec.target import Target
from specdec.target.cache import SlotCache
from specdec.types import Context, keep_rows


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
    """The three parts that a step joins."""

    target: Target
    drafter: Drafter
    sampler: Sampler


class Signature(NamedTuple):
    """What of a call decides which operations a step runs; the settings of its parts do, too.
    Capacity is no part of it: empty slots cost a captured step nothing.

    Args:
        batch_size: B, rows that fill up a bucket included.
        num_draft_tokens: K of the drafter.
        warp: which of a warp's values are in use (`Warp.signature`).
        wants_probs: drafters return probabilities.
        is_captured: steps are to be captured, and so attend over all slots.
    """

    batch_size: int
    num_draft_tokens: int
    warp: tuple
    wants_probs: bool
    is_captured: bool


@dataclass(frozen=True, eq=False)
class StepState:
    """The device side of a batch. `load` writes a new call into the same tensors, so that their
    addresses are the same for all calls that fit into them.

    Args:
        signature: of the calls that are loaded into it.
        vocab_size: V of the target.
        buffer: committed tokens and lengths.
        warp: how the rows' logits become probabilities.
        noise: the rows' random numbers.
        cache: the target's keys and values.
        drafter_state: the drafter's own.
        features: `[B, K + 1, F]` of the tokens before those of the last step, or `None`.
        record: `[B, 2 K + 7]`, what the last step did; see `Outcome`.
        all_valid: `[B]` K, the count of a draft that gives none.
        no_faults: `[B]` 0.
        chunk_start: `[]` position of the first token of the prompt chunk that is read next.
    """

    signature: Signature
    vocab_size: int
    buffer: TokenBuffer
    warp: Warp
    noise: Noise
    cache: SlotCache
    drafter_state: Any
    features: Tensor | None
    record: Tensor
    all_valid: Tensor
    no_faults: Tensor
    chunk_start: Tensor

    @classmethod
    def allocate(
        cls, signature: Signature, num_slots: int, parts: Parts, request: Request
    ) -> StepState:
        """Tensors for calls like the given one that need at most `num_slots` slots; `load` has to
        follow.
        """
        rows, most, target = signature.batch_size, signature.num_draft_tokens, parts.target
        device, drafter = target.device, parts.drafter
        sizes = {"vocab_size": target.vocab_size, "device": device}
        drafter_state = check_state(drafter, drafter.init_state(rows, num_slots, **sizes))
        features = None
        if target.feature_width:
            shape = rows, most + 1, target.feature_width
            features = torch.zeros(shape, dtype=target.dtype, device=device)
        integers = {"dtype": torch.long, "device": device}
        return cls(
            signature=signature,
            vocab_size=target.vocab_size,
            buffer=TokenBuffer(rows, num_slots, num_draft_tokens=most, **sizes),
            warp=Warp(rows, device=device, **request.filled_to(rows).options.warp),
            noise=parts.sampler.noise_type([0] * rows, device=device),
            cache=target.init_cache(rows, num_slots),
            drafter_state=drafter_state,
            features=features,
            record=torch.zeros(rows, 2 * most + 7, **integers),
            all_valid=torch.full((rows,), most, **integers),
            no_faults=torch.zeros(rows, **integers),
            chunk_start=torch.zeros((), **integers),
        )

    def with_options(self, signature: Signature, warp: Warp) -> StepState:
        """The same tensors for calls of another signature, with a warp of theirs."""
        return replace(self, signature=signature, warp=warp)

    @property
    def size_bytes(self) -> int:
        """Bytes of all its tensors."""
        stores = {t.untyped_storage() for t in owned_tensors(self).values()}
        return sum({store.data_ptr(): store.nbytes() for store in stores}.values())

    def load(self, request: Request) -> None:
        """Writes a call of the state's signature into its tensors. Where it has fewer rows than the
        state, the others are inert: they have ended, so they commit nothing.
        """
        num_real = len(request.prompts.lengths)
        request = request.filled_to(self.signature.batch_size)
        prompts, options = request.prompts, request.options
        rows, device = len(prompts.lengths), prompts.tokens.device
        self.buffer.load(
            prompts.tokens,
            prompts.lengths,
            max_new_tokens=request.max_new_tokens,
            eos=options.eos,
        )
        self.buffer.remaining[num_real:] = 0
        self.warp.load(Warp(rows, device=device, **options.warp))
        seeds = request.seeds or [0] * rows
        self.noise.load(type(self.noise)(seeds, device=device))
        self.cache.reset()
        self.drafter_state.reset()
        if self.features is not None:
            self.features.zero_()

    @property
    def num_attended(self) -> int:
        """How many slots the next step attends over: all that the longest row may have committed,
        as far as the host knows, and K more. Steps that are captured attend over all slots, since a
        replay runs no code of the host that could count.
        """
        if self.signature.is_captured:
            return self.cache.num_slots
        return self.buffer.longest + self.signature.num_draft_tokens

    def context(self) -> Context:
        """The drafter's input at the start of a step: tokens, features, positions."""
        buffer, attended = self.buffer, self.num_attended
        return Context(buffer.recent, self.features, buffer.start, buffer.num_new, attended)

    def keep(self, rows: list[int]) -> StepState:
        """The state of the given rows, in the storage of this one, of which only `load` may be
        called from then on; see `keep_rows`.
        """
        return replace(
            self,
            signature=self.signature._replace(batch_size=len(rows)),
            buffer=self.buffer.keep(rows),
            warp=self.warp.keep(rows),
            noise=self.noise.keep(rows),
            cache=self.cache.keep(rows),
            drafter_state=self.drafter_state.keep(rows),
            features=None if self.features is None else keep_rows(self.features, rows),
            record=self.record[: len(rows)],
            all_valid=self.all_valid[: len(rows)],
            no_faults=self.no_faults[: len(rows)],
        )
