"""`GenerationState`: everything that changes while a batch is generated, and what a step does to
it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.cache import SlotCache
from specdec.inputs import Prompts
from specdec.options import Options
from specdec.samplers.noise import Noise, ZeroNoise
from specdec.samplers.warp import Warp
from specdec.types import PAD_TOKEN, Context, Draft, Fault, Verdict


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one step did, still on the device.

    Args:
        draft: what was proposed.
        verdict: what the sampler decided.
        num_new: `[B]` int64, tokens each row keeps: 0 for rows that had ended, fewer than emitted
            where a row ends inside the block.
        is_eos: `[B]` bool, the row ended with an end-of-sequence token in this step.
        logits: `[B, K + 1, V]` of the target, that the verdict was drawn from.
    """

    draft: Draft
    verdict: Verdict
    num_new: Tensor
    is_eos: Tensor
    logits: Tensor

    def fetch(self) -> "PendingOutcome":
        """Starts the transfer to the host and does not wait for it."""
        parts = [
            self.num_new,
            self.is_eos,
            self.verdict.num_accepted,
            self.verdict.tokens,
            self.draft.tokens,
            self.verdict.faults,
            self.verdict.num_drafted,
        ]
        if self.num_new.device.type != "cuda":
            return PendingOutcome(parts, None)
        pinned = [
            p if p is None else torch.empty(p.shape, dtype=p.dtype, pin_memory=True) for p in parts
        ]
        for there, here in zip(pinned, parts, strict=True):
            if here is not None:
                there.copy_(here, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return PendingOutcome(pinned, arrived)


@dataclass(frozen=True, eq=False)
class PendingOutcome:
    """An outcome on its way to the host.

    Args:
        parts: its tensors, on the host once `arrived`; `None` for those that the sampler left out.
        arrived: of the transfer; `None` when there is nothing to wait for.
    """

    parts: list[Tensor | None]
    arrived: torch.cuda.Event | None

    def read(self) -> list["RowOutcome"]:
        """The outcome as plain Python values; this is where the host waits for the device."""
        if self.arrived is not None:
            self.arrived.synchronize()
        num_new, is_eos, num_accepted, tokens, drafted, faults, widths = (
            None if part is None else part.tolist() for part in self.parts
        )
        faults = faults or [0] * len(num_new)
        widths = widths or [len(row) for row in drafted]
        return [
            RowOutcome(
                new_tokens=tokens[row][: num_new[row]],
                draft_tokens=drafted[row][: widths[row]],
                num_accepted=accepted,
                is_eos=is_eos[row],
                faults=Fault(faults[row]),
            )
            for row, accepted in enumerate(num_accepted)
        ]


class RowOutcome(NamedTuple):
    """One row of an outcome, as plain Python values."""

    new_tokens: list[int]
    draft_tokens: list[int]
    num_accepted: int
    is_eos: bool
    faults: Fault


@dataclass(eq=False)
class GenerationState:
    """The rows of one generation. The loop owns it; every tensor is allocated once and updated in
    place.

    Args:
        prompts: the batch as read.
        options: what was asked for.
        warp: the gate from logits to laws.
        noise: the rows' randomness.
        cache: the target's keys, values and lengths. `cache.lengths` is the position of each row's
            last committed token, the anchor, which has not been through the target.
        drafter_state: the drafter's own.
        tokens: `[B, S]` committed tokens; what lies behind a row's anchor is garbage.
        remaining: `[B]` tokens that each row may still commit; 0 for rows that have ended.
        recent: `[B, K + 2]` the anchor of the last step and what its sampler emitted.
        start: `[B]` position of that anchor.
        num_new: `[B]` tokens that the last step committed.
        features: `[B, K + 1, F]` of the tokens before these, or `None`.
        ends: `[V + 1]` 0 for token ids that end a row and K + 1 for all others, `PAD_TOKEN` (the
            last entry) included.
        steps: `[K + 1]` 0, 1, ..., K.
        longest: the host's upper bound of `lengths`.
    """

    prompts: Prompts
    options: Options
    warp: Warp
    noise: Noise | ZeroNoise
    cache: SlotCache
    drafter_state: Any
    tokens: Tensor
    remaining: Tensor
    recent: Tensor
    start: Tensor
    num_new: Tensor
    features: Tensor | None
    ends: Tensor
    steps: Tensor
    longest: int

    @property
    def lengths(self) -> Tensor:
        """`[B]` committed tokens of each row."""
        return self.cache.lengths + 1

    @property
    def has_ended(self) -> Tensor:
        """`[B]` bool: rows that commit nothing any more."""
        return self.remaining == 0

    @property
    def anchor(self) -> Tensor:
        """`[B]` the last committed token of each row."""
        return self.recent.gather(1, self.num_new[:, None])[:, 0]

    @property
    def context(self) -> Context:
        """What the drafter may know at the start of a step."""
        return Context(self.recent, self.features, self.start, self.num_new, self.longest)

    def end_rows(self, rows: list[int]) -> None:
        """Ends rows from outside a step, as a stopping criterion does."""
        with torch.inference_mode():
            self.remaining[rows] = 0

    def bound(self, longest: int) -> None:
        """Tells the state what the host knows of the longest row, so that steps attend over no more
        slots than they need; between calls the bound grows with every step.
        """
        self.longest = min(longest, self.tokens.shape[1] - len(self.steps))

    def commit(
        self, draft: Draft, verdict: Verdict, logits: Tensor, features: Tensor | None
    ) -> Outcome:
        """Appends what was emitted, cut where the row ends.

        Args:
            draft: of this step.
            verdict: of this step.
            logits: `[B, K + 1, V]` that the verdict was drawn from.
            features: `[B, K + 1, F]` of the window, or `None`.
        """
        width = verdict.tokens.shape[1]
        first_end = (self.ends.take(verdict.tokens) + self.steps).amin(dim=1)  # [B]
        num_kept = torch.minimum(verdict.num_emitted, self.remaining)
        is_eos = first_end < num_kept
        torch.cat([self.anchor[:, None], verdict.tokens], dim=1, out=self.recent)
        torch.minimum(num_kept, first_end + 1, out=self.num_new)
        self.start.copy_(self.cache.lengths)

        places = self.cache.lengths[:, None] + self.steps  # of the tokens before the new ones
        self.tokens[:, 1:].scatter_(1, places, verdict.tokens)
        if features is not None:
            self.features.copy_(features)
        self.cache.lengths += self.num_new
        self.remaining -= self.num_new
        self.remaining.masked_fill_(is_eos, 0)
        self.bound(self.longest + width)
        return Outcome(draft, verdict, self.num_new.clone(), is_eos, logits)

    @classmethod
    def begin(
        cls,
        prompts: Prompts,
        options: Options,
        *,
        seeds: list[int] | None,
        noise_type: type[Noise],
        cache: SlotCache,
        drafter_state: Any,
        num_draft_tokens: int,
        vocab_size: int,
        feature_width: int,
        feature_dtype: torch.dtype,
    ) -> "GenerationState":
        """The state before the prompts have been read.

        Args:
            prompts: the batch.
            options: what was asked for.
            seeds: one per row, or `None` where every row is greedy.
            noise_type: the kind of randomness that the sampler needs.
            cache: empty target storage.
            drafter_state: fresh.
            num_draft_tokens: K.
            vocab_size: V of the target.
            feature_width: F, 0 for none.
            feature_dtype: of the target's features.
        """
        device, rows, width = prompts.tokens.device, len(prompts.lengths), num_draft_tokens + 1
        warp = Warp(rows, device=device, **options.warp)
        noise = ZeroNoise(rows, width, device=device)
        if seeds:
            noise = noise_type(seeds, device=device)
        room = options.max_length - prompts.padded.shape[1]
        longest = max(prompts.lengths)
        tokens = torch.full((rows, longest + room + width), PAD_TOKEN, device=device)
        tokens[:, : prompts.tokens.shape[1]] = prompts.tokens
        ends = torch.full((vocab_size + 1,), width, device=device)
        ends[[token for token in options.eos if 0 <= token < vocab_size]] = 0
        num_new = torch.tensor([min(n - 1, 1) for n in prompts.lengths], device=device)
        start = torch.tensor(prompts.lengths, device=device) - 1 - num_new
        features = None
        if feature_width:
            features = torch.zeros(rows, width, feature_width, dtype=feature_dtype, device=device)
        return cls(
            prompts=prompts,
            options=options,
            warp=warp,
            noise=noise,
            cache=cache,
            drafter_state=drafter_state,
            tokens=tokens,
            remaining=torch.full((rows,), room, device=device),
            recent=tokens.gather(1, start[:, None] + torch.arange(width + 1, device=device)),
            start=start,
            num_new=num_new,
            features=features,
            ends=ends,
            steps=torch.arange(width, device=device),
            longest=longest,
        )
