"""`device_step`: propose, verify, accept, commit.

It reads and writes the tensors of one `StepState`. Nothing in it waits for the device or depends on
a number of the host, but for `num_attended`, an argument; so it can run eagerly on a CPU and be
captured as a graph on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.drafters.base import Drafter
from specdec.loop.contracts import sound_draft, sound_verdict
from specdec.loop.outcome import Outcome, write_record
from specdec.loop.state import StepState
from specdec.samplers import Drawing, Sampler
from specdec.samplers.noise import StepNoise
from specdec.target import Target
from specdec.types import Draft, TargetOutput, Verdict

EditLogits = Callable[[Draft, Tensor], Tensor]
"""(draft, logits `[B, K + 1, V]`) -> logits: host code between verification and acceptance."""


@dataclass(frozen=True, eq=False)
class Parts:
    """The three parts that a step joins."""

    target: Target
    drafter: Drafter
    sampler: Sampler


def device_step(
    parts: Parts, state: StepState, *, num_attended: int, edit_logits: EditLogits | None = None
) -> Outcome:
    """One step for every row.

    Args:
        parts: target, drafter and sampler.
        state: updated in place.
        num_attended: upper bound of the slots in use, those of this step's window included.
        edit_logits: host code that changes the target's logits (logits processors). With it the
            step waits for the device and cannot be captured.

    Returns:
        What happened, still on the device.

    Raises:
        ValueError: the drafter proposed another number of tokens than it was asked for.
    """
    noise = state.noise.at(state.buffer.lengths, state.signature.num_draft_tokens + 1)
    draft, faults = propose(parts, state, noise, num_attended)
    output = verify(parts, state, draft, num_attended)
    logits = output.logits if edit_logits is None else edit_logits(draft, output.logits)
    verdict = parts.sampler(draft, logits, state.warp, noise)
    commit(state, draft, verdict, faults, output.features)
    return Outcome(draft, verdict, logits, state.record)


def propose(
    parts: Parts, state: StepState, noise: StepNoise, num_attended: int
) -> tuple[Draft, Tensor]:
    """A draft that keeps the contract of `Draft`, and faults `[B]` of the one that was made."""
    num_draft_tokens, sampler = state.signature.num_draft_tokens, parts.sampler
    wants_probs = state.signature.wants_probs
    drawing = Drawing(num_draft_tokens, state.warp, noise, sampler.draw_draft, wants_probs)
    draft = parts.drafter.propose(state.context(num_attended), state.drafter_state, drawing)
    if draft.tokens.shape[1] != num_draft_tokens:
        raise ValueError(
            f"{type(parts.drafter).__name__} proposed {draft.tokens.shape[1]} tokens per row and "
            f"was asked for {num_draft_tokens} (drawing.num_draft_tokens); use num_valid for fewer"
        )
    if not wants_probs:  # a drafter may return them without being asked
        draft = Draft(draft.tokens, None, draft.num_valid)
    return sound_draft(draft, parts.target.vocab_size)


def verify(parts: Parts, state: StepState, draft: Draft, num_attended: int) -> TargetOutput:
    """The target's logits and features of the anchor and the draft."""
    buffer = state.buffer
    return parts.target.verify(
        state.cache, buffer.lengths, buffer.anchor, draft, num_attended=num_attended
    )


def commit(
    state: StepState, draft: Draft, verdict: Verdict, faults: Tensor, features: Tensor | None
) -> None:
    """Appends what was emitted, and writes down what happened."""
    tokens, num_accepted, found = sound_verdict(verdict, draft, state.vocab_size)
    is_eos = state.buffer.commit(tokens, num_accepted)
    if features is not None:
        state.features.copy_(features)
    num_drafted = draft.num_valid
    if num_drafted is None:
        num_drafted = torch.full_like(num_accepted, draft.tokens.shape[1])
    write_record(
        state.record,
        num_new=state.buffer.num_new,
        is_eos=is_eos,
        num_accepted=num_accepted,
        num_drafted=num_drafted,
        faults=faults | found,
        emitted=tokens,
        drafted=draft.tokens,
    )
