"""What drafters and samplers must keep to, checked on the device and without waiting.

What breaks a contract is noted as a `Fault` and brought into a form that cannot harm the step; the
host raises when it reads the step, before any of its tokens is emitted.

Legend: B rows, K draft tokens, V vocabulary.
"""

import torch
from torch import Tensor

from specdec.types import Draft, Fault, Verdict


def sound_draft(draft: Draft, vocab_size: int) -> tuple[Draft, Tensor]:
    """A draft whose ids are all of the vocabulary, and whose counts are in range.

    Args:
        draft: of a drafter; entries at or beyond `num_valid` may hold anything.
        vocab_size: V.

    Returns:
        The draft, and faults `[B]` int64.
    """
    width = draft.tokens.shape[1]
    tokens = draft.tokens.clamp(0, vocab_size - 1)
    is_foreign = tokens != draft.tokens
    if draft.num_valid is None:
        num_valid, faults = None, 0
    else:
        num_valid = draft.num_valid.clamp(0, width)
        index = torch.arange(width, device=tokens.device)
        is_foreign = is_foreign & (index < num_valid[:, None])
        faults = (num_valid != draft.num_valid) * int(Fault.NUM_VALID)
    faults = faults + is_foreign.any(dim=1) * int(Fault.DRAFT_ID)
    return Draft(tokens, draft.probs, num_valid), faults


def sound_verdict(verdict: Verdict, draft: Draft, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """What can be committed of a verdict.

    Args:
        verdict: of a sampler.
        draft: what it decided on, from `sound_draft`.
        vocab_size: V.

    Returns:
        Tokens `[B, K + 1]`, all of them ids of the vocabulary; how many were accepted, `[B]`; and
        faults `[B]` int64, the verdict's own included.
    """
    width = draft.tokens.shape[1]
    most = width if draft.num_valid is None else draft.num_valid
    num_accepted = verdict.num_accepted.clamp(min=0).clamp(max=most)
    faults = (num_accepted != verdict.num_accepted) * int(Fault.NUM_ACCEPTED)
    tokens = verdict.tokens.clamp(0, vocab_size - 1)
    is_emitted = torch.arange(width + 1, device=tokens.device) <= num_accepted[:, None]
    is_foreign = (tokens != verdict.tokens) & is_emitted
    faults = faults + is_foreign.any(dim=1) * int(Fault.EMITTED_ID)
    if verdict.faults is not None:
        faults = faults | verdict.faults
    return tokens, num_accepted, faults
