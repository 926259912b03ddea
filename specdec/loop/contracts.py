"""The contracts of drafters and samplers.

On the device, what breaks a contract is brought into a form that cannot harm the step: no id is
looked up that has no embedding, no row grows by more than it may. The step's record keeps the
original ids and counts, and the host checks them (`broken_contracts`) before any token of the step
is emitted. So the checks cost the device four operations.

Legend: B rows, K draft tokens, V vocabulary.
"""

from torch import Tensor

from specdec.types import Draft, Fault, Verdict


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
    emitted: list[int], drafted: list[int], num_accepted: int, num_valid: int, vocab_size: int
) -> int:
    """What is wrong with a row of a step, as drafter and sampler returned it.

    Args:
        emitted: K + 1 tokens.
        drafted: K tokens.
        num_accepted: of them.
        num_valid: of the drafted tokens.
        vocab_size: V.

    Returns:
        A sum of `Fault` values, 0 for a sound row.

    Example:
        >>> Fault(broken_contracts([5, 99, -1], [5, 6], 1, 2, vocab_size=50))
        <Fault.EMITTED_ID: 64>
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
    return int(faults)
