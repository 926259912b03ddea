"""`GenerationState`: everything that changes while a batch is generated, and what a step does to
it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.cache import SlotCache
from specdec.inputs import Prompts
from specdec.kernels import Books, open_books
from specdec.options import Options
from specdec.samplers.noise import Noise, ZeroNoise
from specdec.samplers.warp import Warp
from specdec.types import PAD_TOKEN, Context, Draft, Verdict, keep_rows, rows_to_keep


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
                faults=faults[row],
            )
            for row, accepted in enumerate(num_accepted)
        ]


class RowOutcome(NamedTuple):
    """One row of an outcome, as plain Python values; `faults` is a sum of `Fault` values."""

    new_tokens: list[int]
    draft_tokens: list[int]
    num_accepted: int
    is_eos: bool
    faults: int


@dataclass(eq=False)
class GenerationState:
    """The rows of one generation. The loop owns it; every tensor is allocated once and updated in
    place.

    Args:
        prompts: the whole batch as read.
        options: what was asked for.
        warp: the gate from logits to laws.
        noise: the rows' randomness.
        cache: the target's keys and values.
        drafter_state: the drafter's own.
        books: what each row has committed. `books.lengths` is `cache.lengths`: the position of the
            anchor, which has not been through the target.
        features: `[B, K + 1, F]` of the tokens before those of the last step, or `None`.
        width: K + 1, tokens that a step may emit.
        longest: the host's upper bound of `cache.lengths`.
        rows: which row of the batch each row is; B of them, until some are dropped.
    """

    prompts: Prompts
    options: Options
    warp: Warp
    noise: Noise | ZeroNoise
    cache: SlotCache
    drafter_state: Any
    books: Books
    features: Tensor | None
    width: int
    longest: int
    rows: list[int]

    @property
    def tokens(self) -> Tensor:
        """`[B, S]` committed tokens; what lies behind a row's anchor is garbage."""
        return self.books.text

    @property
    def lengths(self) -> Tensor:
        """`[B]` committed tokens of each row."""
        return self.cache.lengths + 1

    @property
    def has_ended(self) -> Tensor:
        """`[B]` bool: rows that commit nothing any more."""
        return self.books.remaining == 0

    @property
    def context(self) -> Context:
        """What the drafter may know at the start of a step."""
        books = self.books
        return Context(books.recent, self.features, books.start, books.num_new, self.longest)

    def end_rows(self, rows: list[int]) -> None:
        """Ends rows of the batch from outside a step, as a stopping criterion does."""
        with torch.inference_mode():
            self.books.remaining[[self.rows.index(row) for row in rows if row in self.rows]] = 0

    def drop_ended(self) -> None:
        """Goes on with the rows that have not ended, in the same storage, so that steps cost less.

        Every outcome of the rows so far must have been read, and asking which have ended waits for
        the device. With logits processors all rows stay: those may go by row numbers of the batch.
        """
        if self.options.processors:
            return
        rows = rows_to_keep([remaining > 0 for remaining in self.books.remaining.tolist()])
        if 0 < len(rows) < len(self.rows):
            self._keep(rows)

    @torch.inference_mode()
    def _keep(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
        self.warp, self.noise = self.warp.keep(rows), self.noise.keep(rows)
        self.cache, self.drafter_state = self.cache.keep(rows), self.drafter_state.keep(rows)
        self.books = self.books.keep(rows)
        if self.features is not None:
            self.features = keep_rows(self.features, rows)

    def bound(self, longest: int) -> None:
        """Tells the state what the host knows of the longest row, so that steps attend over no more
        slots than they need; between calls the bound grows with every step.
        """
        self.longest = min(longest, self.tokens.shape[1] - self.width)

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
        is_eos = self.books.commit(verdict.tokens, verdict.num_accepted)
        if features is not None:
            self.features.copy_(features)
        self.bound(self.longest + self.width)
        return Outcome(draft, verdict, self.books.num_new.clone(), is_eos, logits)

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
        device, count, width = prompts.tokens.device, len(prompts.lengths), num_draft_tokens + 1
        warp = Warp(count, device=device, **options.warp)
        noise = ZeroNoise(count, width, device=device)
        if seeds:
            noise = noise_type(seeds, device=device)
        room = options.max_length - prompts.padded.shape[1]
        longest = max(prompts.lengths)
        tokens = torch.full((count, longest + room + width), PAD_TOKEN, device=device)
        tokens[:, : prompts.tokens.shape[1]] = prompts.tokens
        books = open_books(
            tokens,
            cache.lengths,
            torch.tensor(prompts.lengths, device=device) - 1,
            room=room,
            ends=options.eos,
            width=width,
            vocab_size=vocab_size,
        )
        features = None
        if feature_width:
            features = torch.zeros(count, width, feature_width, dtype=feature_dtype, device=device)
        return cls(
            prompts=prompts,
            options=options,
            warp=warp,
            noise=noise,
            cache=cache,
            drafter_state=drafter_state,
            books=books,
            features=features,
            width=width,
            longest=longest,
            rows=list(range(count)),
        )
