"""`GenerationState`: everything that changes while a batch is generated, and what a step does to it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.cache import SlotCache
from specdec.inputs import Prompts
from specdec.options import Options
from specdec.samplers.noise import Noise, ZeroNoise
from specdec.samplers.warp import Warp
from specdec.types import PAD_TOKEN, Context, Draft, Verdict


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one step did, still on the device.

    Args:
        draft: what was proposed.
        verdict: what the sampler decided.
        num_new: `[B]` int64, tokens each row keeps: 0 for rows that had ended, fewer than emitted where a row ends
            inside the block.
        is_eos: `[B]` bool, the row ended with an end-of-sequence token in this step.
        is_faulty: `[B]` bool, the target's logits held NaN or +inf where a token was drawn from them.
    """

    draft: Draft
    verdict: Verdict
    num_new: Tensor
    is_eos: Tensor
    is_faulty: Tensor

    def to_host(self) -> list[list[int]]:
        """One transfer: per row num_new, is_eos, is_faulty, num_accepted, num_drafted, then both token lists."""
        verdict = self.verdict
        heads = [self.num_new, self.is_eos, self.is_faulty, verdict.num_accepted, verdict.num_drafted]
        packed = torch.cat([torch.stack(heads, dim=1), verdict.tokens, self.draft.tokens], dim=1)
        return packed.tolist()


@dataclass(eq=False)
class GenerationState:
    """The rows of one generation. The loop owns it; every tensor is allocated once and updated in place.

    Args:
        prompts: the batch as read.
        options: what was asked for.
        warp: the gate from logits to laws.
        noise: the rows' randomness.
        cache: the target's keys, values and lengths; `cache.lengths == lengths - 1` between steps, because the last
            committed token has not been through the target.
        drafter_state: the drafter's own.
        tokens: `[B, S]` committed tokens; what lies at or beyond a row's length is garbage.
        lengths: `[B]` committed tokens.
        limits: `[B]` length at which each row ends.
        has_ended: `[B]` bool; ended rows commit nothing.
        eos: `[E]` token ids that end a row.
        window: `[B, K + 2]` anchor and newly committed tokens, for the drafter's next context.
        features: `[B, K + 1, F]` beside them, or `None`.
        num_new: `[B]` how many of the new tokens are valid.
        longest: the host's upper bound of `lengths`.
    """

    prompts: Prompts
    options: Options
    warp: Warp
    noise: Noise | ZeroNoise
    cache: SlotCache
    drafter_state: Any
    tokens: Tensor
    lengths: Tensor
    limits: Tensor
    has_ended: Tensor
    eos: Tensor
    window: Tensor
    features: Tensor | None
    num_new: Tensor
    longest: int

    @property
    def anchor(self) -> Tensor:
        """`[B]` the last committed token of each row."""
        return self.tokens.gather(1, self.lengths[:, None] - 1)[:, 0]

    @property
    def context(self) -> Context:
        """What the drafter may know at the start of a step."""
        start = self.lengths - self.num_new - 1
        return Context(self.window, self.features, start, self.num_new, self.longest)

    def commit(self, draft: Draft, verdict: Verdict, logits: Tensor, features: Tensor | None) -> Outcome:
        """Appends what was emitted, cut at the row's end, and prepares the next context.

        Args:
            draft: of this step.
            verdict: of this step.
            logits: `[B, K + 1, V]` that the verdict was drawn from, to see faults.
            features: `[B, K + 1, F]` of the window, or `None`.
        """
        width = verdict.tokens.shape[1]
        offsets = torch.arange(width, device=self.tokens.device)
        is_live = ~self.has_ended
        num_kept = torch.minimum(verdict.num_emitted, self.limits - self.lengths)
        is_kept = (offsets < num_kept[:, None]) & is_live[:, None]
        ends_row = (verdict.tokens[..., None] == self.eos).any(dim=-1) & is_kept
        num_ends_before = ends_row.long().cumsum(dim=1) - ends_row.long()
        num_new = (is_kept & (num_ends_before == 0)).sum(dim=1)
        is_eos = ends_row.any(dim=1)
        is_read = offsets <= verdict.num_accepted[:, None]
        is_faulty = (~logits.amax(dim=-1).isfinite() & is_read).any(dim=1) & is_live

        self.window[:, :1] = self.anchor[:, None]
        self.window[:, 1:] = verdict.tokens
        if features is not None:
            self.features.copy_(features)
        self.tokens.scatter_(1, self.lengths[:, None] + offsets, verdict.tokens)
        self.num_new.copy_(num_new)
        self.lengths += num_new
        self.cache.lengths += num_new
        self.has_ended |= is_eos | (self.lengths >= self.limits)
        self.longest = min(self.longest + width, self.tokens.shape[1] - width)
        return Outcome(draft, verdict, num_new, is_eos, is_faulty)

    @classmethod
    def begin(
        cls,
        prompts: Prompts,
        options: Options,
        *,
        seeds: list[int] | None,
        cache: SlotCache,
        drafter_state: Any,
        num_draft_tokens: int,
        feature_width: int,
        feature_dtype: torch.dtype,
    ) -> "GenerationState":
        """The state before the prompts have been read.

        Args:
            prompts: the batch.
            options: what was asked for.
            seeds: one per row, or `None` where every row is greedy.
            cache: empty target storage.
            drafter_state: fresh.
            num_draft_tokens: K.
            feature_width: F, 0 for none.
            feature_dtype: of the target's features.
        """
        device, rows, width = prompts.tokens.device, len(prompts.lengths), num_draft_tokens + 1
        warp = Warp(rows, device=device, **options.warp)
        if warp.is_greedy:
            noise = ZeroNoise(rows, width, device=device)
        else:
            noise = Noise(seeds, device=device)
        room = options.max_length - prompts.padded.shape[1]
        lengths = torch.tensor(prompts.lengths, device=device)
        longest = max(prompts.lengths)
        tokens = torch.full((rows, longest + room + width), PAD_TOKEN, device=device)
        tokens[:, : prompts.tokens.shape[1]] = prompts.tokens
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
            lengths=lengths,
            limits=lengths + room,
            has_ended=torch.zeros(rows, dtype=torch.bool, device=device),
            eos=torch.tensor(options.eos, dtype=torch.long, device=device),
            window=torch.full((rows, width + 1), PAD_TOKEN, device=device),
            features=features,
            num_new=(lengths > 1).long(),
            longest=longest,
        )
