"""What became of a draft, for drafters that read it."""

from __future__ import annotations

from dataclasses import replace

from specdec.drafters.verified import Verified
from specdec.loop.state import Parts, StepState
from specdec.types import PAD_TOKEN, Draft, TargetOutput, Verdict


def learn(
    parts: Parts, state: StepState, draft: Draft, output: TargetOutput, verdict: Verdict
) -> None:
    """Shows the drafter a step that was committed: its verdict with ids and counts in their ranges,
    as `commit` takes them; faults are found in the one that came.
    """
    found = replace(
        verdict,
        tokens=verdict.tokens.clamp(PAD_TOKEN, state.vocab_size - 1),
        num_accepted=verdict.num_accepted.clamp(0, draft.depth),
        path=None if verdict.path is None else verdict.path.clamp(0, draft.tokens.shape[1]),
    )
    num_new, root = state.buffer.num_new, state.buffer.recent[:, 0]
    parts.drafter.learn(Verified(draft, output, found, num_new, root), state.drafter_state)
