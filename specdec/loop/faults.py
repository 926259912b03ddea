"""What is wrong with a step, in words that name the part whose fault it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.arguments import name_of
from specdec.loop.outcome import Fault, Outcome, PendingOutcome, find_faults
from specdec.row_step import RowStep
from specdec.types import Draft, Verdict

_TEXTS = {
    Fault.TARGET_LOGITS: (
        "the target's logits hold NaN or infinity, or nothing but -inf; check the model's weights, "
        "its dtype (float16 overflows) and logits processors that forbid every token"
    ),
    Fault.DRAFT_PROBS: (
        "{drafter}: draft probabilities are negative or do not sum to 1; Draft.probs must hold "
        "probabilities over the target's vocabulary, not logits"
    ),
    Fault.DRAFT_TOKEN: (
        "{drafter}: a draft token has probability 0 in Draft.probs; it must hold the distribution "
        "that the token was actually drawn from, or be None for a deterministic proposal"
    ),
    Fault.DRAFT_ID: (
        "{drafter}: a draft token lies outside the target's vocabulary; mark tokens that are to be "
        "ignored with Draft.num_valid"
    ),
    Fault.NUM_VALID: "{drafter}: Draft.num_valid is outside 0..K",
    Fault.PARENT: (
        "{drafter}: Draft.parents of node i is outside -1..i - 1; -1 is the root, and a parent "
        "comes before its children"
    ),
    Fault.NUM_ACCEPTED: (
        "{sampler}: the sampler accepted fewer than 0 tokens or more than were drafted; check "
        "Verdict.num_accepted"
    ),
    Fault.NUM_DRAFTED: (
        "{sampler}: Verdict.num_drafted is less than were accepted or more than were drafted; pass "
        "draft.num_valid, or None where every row has K draft tokens"
    ),
    Fault.EMITTED_ID: (
        "{sampler}: the sampler emitted a token outside the target's vocabulary; check "
        "Verdict.tokens"
    ),
    Fault.ACCEPTED_TOKEN: (
        "{sampler}: the sampler accepted tokens that are not the draft's; Verdict.tokens must "
        "begin with the first num_accepted of draft.tokens, or those of a path from the root"
    ),
}
"""In the order in which one of several is named."""


def fault_text(faults: int, drafter: object, sampler: object) -> str:
    """The first of a row's faults, a sum of `Fault` values, in words that name the part whose it
    is.
    """
    text = next(text for fault, text in _TEXTS.items() if fault & faults)
    return text.format(drafter=name_of(drafter), sampler=name_of(sampler))


def text_of_step(collector: Any, number: int, step: RowStep, outcome: PendingOutcome) -> str:
    """What is wrong with a step of a row.

    Args:
        collector: an `OutputCollector`, with the row's new tokens that are sound.
        number: of the row.
        step: of the row.
        outcome: the step of all rows.
    """
    generation, num_tokens = collector.generation, len(collector.new_tokens[number])
    parts, index = generation.parts, generation.rows.index(number)
    num_steps = collector.num_collected
    drafted, emitted = (outcome.columns[n][index].tolist() for n in ("drafted", "emitted"))
    return (
        f"in row {number} after {num_tokens} new tokens (step {num_steps}) "
        f"{fault_text(step.faults, parts.drafter, parts.sampler)}"
        f" (drafted {drafted}, {step.num_accepted} accepted, emitted {emitted})"
    )


def check_decisions(sampler: object, verdict: Verdict, draft: Draft, logits: Tensor) -> None:
    """Raises `ValueError` for the first row of a verdict that breaks its contract; waits for the
    device. Draft probabilities and logits are not looked at.
    """
    vocab_size, none = logits.shape[-1], torch.zeros_like(verdict.num_accepted)
    told = Outcome(draft, verdict, logits, none, none > 0, vocab_size).fetch().columns
    faults = find_faults(told, vocab_size)
    for row in faults.nonzero()[0][:1].tolist():
        drafted, emitted = (told[name][row].tolist() for name in ("drafted", "emitted"))
        raise ValueError(
            f"in row {row} {fault_text(int(faults[row]), None, sampler)} (drafted {drafted}, "
            f"{told['num_accepted'][row]} accepted, emitted {emitted})"
        )
