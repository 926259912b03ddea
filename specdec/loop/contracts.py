"""The contracts of drafters and samplers.

On the device, what breaks a contract is brought into a form that cannot harm the step: no id is
looked up that has no embedding, no row grows by more than it may. The step's record keeps the
original ids and counts, and the host checks them (`broken_contracts`) before any token of the step
is emitted. So the checks cost the device four operations. Types, shapes, data types and devices are
checked by the host in every step that runs eagerly (`check_draft`, `check_verdict`).

Legend: B rows, K draft tokens, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from specdec.arguments import shown
from specdec.drafters.base import Drafter
from specdec.samplers import Sampler
from specdec.types import Draft, Fault, Verdict

_OF_TARGET = {
    Fault.TARGET_LOGITS: (
        "the target's logits hold NaN or infinity, or nothing but -inf; check the model's weights, "
        "its dtype (float16 overflows) and logits processors that forbid every token"
    ),
}
_OF_DRAFTER = {
    Fault.DRAFT_PROBS: (
        "draft probabilities are negative or do not sum to 1; Draft.probs must hold probabilities "
        "over the target's vocabulary, not logits"
    ),
    Fault.DRAFT_TOKEN: (
        "a draft token has probability 0 in Draft.probs; it must hold the distribution that the "
        "token was actually drawn from, or be None for a deterministic proposal"
    ),
    Fault.DRAFT_ID: (
        "a draft token lies outside the target's vocabulary; mark tokens that are to be ignored "
        "with Draft.num_valid"
    ),
    Fault.NUM_VALID: "Draft.num_valid is outside 0..K",
}
_OF_SAMPLER = {
    Fault.NUM_ACCEPTED: (
        "the sampler accepted fewer than 0 tokens or more than were drafted; check "
        "Verdict.num_accepted"
    ),
    Fault.NUM_DRAFTED: (
        "Verdict.num_drafted is less than were accepted or more than were drafted; pass "
        "draft.num_valid, or None where every row has K draft tokens"
    ),
    Fault.EMITTED_ID: (
        "the sampler emitted a token outside the target's vocabulary; check Verdict.tokens"
    ),
    Fault.ACCEPTED_TOKEN: (
        "the sampler accepted tokens that are not the draft's; Verdict.tokens must begin with the "
        "first num_accepted of draft.tokens"
    ),
}


def fault_text(faults: int, drafter: Drafter, sampler: Sampler) -> str:
    """The first of a row's faults, in words that name the part whose it is.

    Args:
        faults: a sum of `Fault` values, not 0.
        drafter: of the step.
        sampler: of the step.

    Example:
        >>> from specdec import BlockSampler, NoDrafter
        >>> fault_text(Fault.NUM_VALID, NoDrafter(), BlockSampler())
        'NoDrafter: Draft.num_valid is outside 0..K'
    """
    for texts, part in ((_OF_TARGET, None), (_OF_DRAFTER, drafter), (_OF_SAMPLER, sampler)):
        for fault, text in texts.items():
            if fault & faults:
                return text if part is None else f"{name_of(part)}: {text}"
    raise AssertionError(f"no such fault: {faults}")


def name_of(part: object) -> str:
    """What messages call a part: its class, or the name of a foreign rule."""
    name = getattr(part, "name", None)
    return name if isinstance(name, str) else type(part).__name__


def check_draft(
    drafter: Drafter,
    draft: Any,
    *,
    batch_size: int,
    num_draft_tokens: int,
    vocab_size: int,
    device: torch.device,
) -> Draft:
    """Returns what a drafter proposed, if it is a draft of the step's sizes.

    Raises:
        TypeError: no `Draft`.
        ValueError: other sizes or another device; names both sides.
    """
    who = f"{type(drafter).__name__}.propose"
    if not isinstance(draft, Draft):
        raise TypeError(
            f"{who} must return a specdec.types.Draft, got {shown(draft)}; "
            "Draft(tokens, probs, num_valid) is one"
        )
    rows, width = draft.tokens.shape
    if width != num_draft_tokens:
        raise ValueError(
            f"{type(drafter).__name__} proposed {width} tokens per row and was asked for "
            f"{num_draft_tokens} (drawing.num_draft_tokens); use num_valid for fewer"
        )
    if rows != batch_size:
        raise ValueError(f"{who} returned draft.tokens of {rows} rows for a batch of {batch_size}")
    if draft.tokens.device != device:
        raise ValueError(f"{who} returned a draft on {draft.tokens.device}, expected {device}")
    if draft.probs is not None and draft.probs.shape[-1] != vocab_size:
        raise ValueError(
            f"{who} returned draft.probs over a vocabulary of {draft.probs.shape[-1]}, but target "
            f"logits have {vocab_size}; the drafter must express its probabilities over the "
            "target's vocabulary"
        )
    return draft


def check_verdict(sampler: Sampler, verdict: Any, draft: Draft) -> Verdict:
    """Returns what a sampler decided, if it is a verdict of the draft's sizes.

    Raises:
        TypeError: no `Verdict`.
        ValueError: other sizes or another device; names both sides.
    """
    who = name_of(sampler)
    if not isinstance(verdict, Verdict):
        raise TypeError(
            f"{who} must return a specdec.types.Verdict, got {shown(verdict)}; "
            "Verdict(tokens, num_accepted) is one"
        )
    rows, width = draft.tokens.shape
    if verdict.tokens.shape != (rows, width + 1):
        raise ValueError(
            f"{who} returned verdict.tokens of shape {list(verdict.tokens.shape)}, expected "
            f"{[rows, width + 1]}: {width} draft tokens and one more per row, padded with "
            "PAD_TOKEN (see specdec.kernels.append_token)"
        )
    if verdict.tokens.device != draft.tokens.device:
        raise ValueError(
            f"{who} returned a verdict on {verdict.tokens.device}, expected {draft.tokens.device}"
        )
    return verdict


def check_decisions(sampler: Sampler, verdict: Verdict, draft: Draft, vocab_size: int) -> None:
    """Raises `ValueError` for the first row of a verdict that breaks its contract; waits for the
    device. In a step `broken_contracts` does the same for each row that has arrived on the host.
    """
    width, accepted = draft.tokens.shape[1], verdict.num_accepted[:, None]
    valid = (
        torch.full_like(accepted, width) if draft.num_valid is None else draft.num_valid[:, None]
    )
    seen = valid if verdict.num_drafted is None else verdict.num_drafted[:, None]
    index, tokens = torch.arange(width + 1, device=accepted.device), verdict.tokens
    is_off = (index <= accepted) & ((tokens < 0) | (tokens >= vocab_size))  # [B, K + 1]
    is_off[:, :width] |= (index[:width] < accepted) & (tokens[:, :width] != draft.tokens)
    is_off |= (accepted < 0) | (accepted > seen) | (seen > valid)
    rows = is_off.any(dim=1).nonzero()[:, 0].tolist()
    if not rows:
        return
    row = rows[0]
    emitted, drafted = tokens[row].tolist(), draft.tokens[row].tolist()
    counts = int(accepted[row]), int(valid[row]), vocab_size, int(seen[row])
    faults = broken_contracts(emitted, drafted, *counts)
    text = next(text for fault, text in _OF_SAMPLER.items() if fault & faults)
    raise ValueError(
        f"in row {row} {name_of(sampler)}: {text} (drafted {drafted}, {counts[0]} accepted, "
        f"emitted {emitted})"
    )


def harmless_draft(draft: Draft, vocab_size: int) -> Draft:
    """A draft whose ids are all of the vocabulary, and whose counts are in 0..K."""
    width, num_valid = draft.tokens.shape[1], draft.num_valid
    if num_valid is not None:
        num_valid = num_valid.clamp(0, width)
    return Draft(draft.tokens.clamp(0, vocab_size - 1), draft.probs, num_valid)


def harmless_verdict(verdict: Verdict, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Tokens `[B, K + 1]` that are all of the vocabulary, and counts `[B]` in 0..K."""
    tokens = verdict.tokens.clamp(0, vocab_size - 1)
    return tokens, verdict.num_accepted.clamp(0, tokens.shape[1] - 1)


def broken_contracts(
    emitted: list[int],
    drafted: list[int],
    num_accepted: int,
    num_valid: int,
    vocab_size: int,
    num_drafted: int | None = None,
) -> int:
    """What is wrong with a row of a step, as drafter and sampler returned it.

    Args:
        emitted: K + 1 tokens.
        drafted: K tokens.
        num_accepted: of them.
        num_valid: of the drafted tokens.
        vocab_size: V.
        num_drafted: by the verdict; `None` is `num_valid`.

    Returns:
        A sum of `Fault` values, 0 for a sound row.

    Example:
        >>> Fault(broken_contracts([5, 99, -1], [5, 6], 1, 2, vocab_size=50))
        <Fault.EMITTED_ID: 64>
        >>> Fault(broken_contracts([7, 9, -1], [5, 6], 1, 2, vocab_size=50))
        <Fault.ACCEPTED_TOKEN: 128>
    """
    faults = 0
    if not 0 <= num_valid <= len(drafted):
        faults |= Fault.NUM_VALID
    if not 0 <= num_accepted <= num_valid:
        faults |= Fault.NUM_ACCEPTED
    if any(not 0 <= token < vocab_size for token in drafted[: max(num_valid, 0)]):
        faults |= Fault.DRAFT_ID
    if any(not 0 <= token < vocab_size for token in emitted[: max(num_accepted, 0) + 1]):
        faults |= Fault.EMITTED_ID
    if emitted[: max(num_accepted, 0)] != drafted[: max(num_accepted, 0)]:
        faults |= Fault.ACCEPTED_TOKEN
    if num_drafted is not None and not num_accepted <= num_drafted <= num_valid:
        faults |= Fault.NUM_DRAFTED
    return int(faults)
