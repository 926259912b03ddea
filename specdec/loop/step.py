"""`device_step`: propose, verify, accept, commit.

It reads and writes the tensors of one `StepState`. Nothing in it waits for the device, and captured
it depends on no number of the host; so it can run eagerly on a CPU and as a graph on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.drafters.base import Drafter
from specdec.loop.contracts import check_draft, check_verdict, harmless_draft, harmless_verdict
from specdec.loop.outcome import Outcome
from specdec.loop.state import StepState
from specdec.samplers import Drawing, Sampler
from specdec.samplers.noise import StepNoise
from specdec.target import Target
from specdec.types import PAD_TOKEN, Draft, TargetOutput, Verdict

EditLogits = Callable[[Draft, Tensor], Tensor]
"""(draft, logits `[B, K + 1, V]`) -> logits: host code between verification and acceptance."""

Mark = Callable[[str], None]
"""Takes the time: at `"start"` of a step and after its parts `"draft"`, `"verify"`, `"sample"`."""


@dataclass(frozen=True)
class Parts:
    """The three parts that a step joins."""

    target: Target
    drafter: Drafter
    sampler: Sampler


def device_step(
    parts: Parts,
    state: StepState,
    *,
    num_draft_tokens: int | None = None,
    edit_logits: EditLogits | None = None,
    mark: Mark | None = None,
) -> Outcome:
    """One step for every row.

    Args:
        parts: target, drafter and sampler.
        state: updated in place.
        num_draft_tokens: how many tokens to draft, 0..K of the state; `None` is K.
        edit_logits: host code that changes the target's logits (logits processors). With it the
            step waits for the device and cannot be captured.
        mark: called at the start and after each part of the step, to take times.

    Returns:
        What happened, still on the device.

    Raises:
        TypeError, ValueError: drafter or sampler returned no draft or verdict of the step's sizes.
    """
    if num_draft_tokens is None:
        num_draft_tokens = state.signature.num_draft_tokens
    if mark is not None:
        mark("start")
    noise = state.noise.at(state.buffer.lengths, num_draft_tokens + 1)
    draft = propose(parts, state, noise, num_draft_tokens)
    if mark is not None:
        mark("draft")
    output = verify(parts, state, draft)
    logits = output.logits if edit_logits is None else edit_logits(draft, output.logits)
    if mark is not None:
        mark("verify")
    verdict = check_verdict(parts.sampler, parts.sampler(draft, logits, state.warp, noise), draft)
    commit(state, draft, verdict, output.features)
    if mark is not None:
        mark("sample")
    return Outcome(draft, verdict, logits, state.record, state.vocab_size)


def propose(parts: Parts, state: StepState, noise: StepNoise, num_draft_tokens: int) -> Draft:
    """What the drafter proposes, with ids and counts brought into their ranges; the state's record
    keeps them as they came.

    A drafter is never asked for 0 tokens. Where a step wants none, one is drafted and dropped, so
    that the drafter has read what was committed when a later step wants some.
    """
    most = state.signature.num_draft_tokens
    draft = Draft(state.buffer.tokens[:, :0])
    if most > 0:
        drafted = _draft(parts, state, noise, max(num_draft_tokens, 1))
        draft = drafted if num_draft_tokens > 0 else draft
    columns = [_num_valid(state, draft)[:, None], _filled(draft.tokens, most)]
    torch.cat(columns, dim=1, out=state.record[:, -1 - most :])
    return harmless_draft(draft, state.vocab_size)


def _draft(parts: Parts, state: StepState, noise: StepNoise, num_draft_tokens: int) -> Draft:
    """The drafter's own proposal, of the right sizes."""
    sampler, wants_probs = parts.sampler, state.signature.wants_probs
    drawing = Drawing(num_draft_tokens, state.warp, noise, sampler.draw_draft, wants_probs)
    draft = parts.drafter.propose(state.context(), state.drafter_state, drawing)
    lengths = state.buffer.lengths
    check_draft(
        parts.drafter,
        draft,
        batch_size=len(lengths),
        num_draft_tokens=num_draft_tokens,
        vocab_size=state.vocab_size,
        device=lengths.device,
    )
    if draft.probs is not None and not wants_probs:  # a drafter may return them unasked
        draft = Draft(draft.tokens, None, draft.num_valid)
    return draft


def verify(parts: Parts, state: StepState, draft: Draft) -> TargetOutput:
    """The target's logits and features of the anchor and the draft."""
    buffer = state.buffer
    return parts.target.verify(
        state.cache, buffer.lengths, buffer.anchor, draft, num_attended=state.num_attended
    )


def commit(state: StepState, draft: Draft, verdict: Verdict, features: Tensor | None) -> None:
    """Appends what was emitted, and writes down what happened. The tables of a state have room for
    K draft tokens; a shorter draft leaves the rest of them empty.
    """
    width = draft.tokens.shape[1]
    is_eos = state.buffer.commit(*harmless_verdict(verdict, state.vocab_size))
    if features is not None:
        state.features[:, : width + 1].copy_(features)
    num_seen = _num_valid(state, draft) if verdict.num_drafted is None else verdict.num_drafted
    faults = state.no_faults if verdict.faults is None else verdict.faults
    counts = state.buffer.num_new, is_eos, verdict.num_accepted, num_seen, faults
    columns = [count[:, None] for count in counts]
    most = state.signature.num_draft_tokens
    emitted = _filled(verdict.tokens, most + 1)
    torch.cat([*columns, emitted], dim=1, out=state.record[:, : -1 - most])


def _num_valid(state: StepState, draft: Draft) -> Tensor:
    """`[B]`, as the draft says, or all of its tokens."""
    if draft.num_valid is not None:
        return draft.num_valid
    width = draft.tokens.shape[1]
    is_whole = width == state.signature.num_draft_tokens
    return state.all_valid if is_whole else state.all_valid.clamp(max=width)


def _filled(tokens: Tensor, width: int) -> Tensor:
    """`[B, width]`: the tokens, and `PAD_TOKEN` after them."""
    missing = width - tokens.shape[1]
    return F.pad(tokens, (0, missing), value=PAD_TOKEN) if missing else tokens
