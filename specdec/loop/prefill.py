"""Reads the prompts into the target and the drafter, chunk by chunk."""

import torch

from specdec.loop.state import StepState
from specdec.loop.step import Parts
from specdec.request.prompts import Prompts
from specdec.types import Context


def prefill(parts: Parts, state: StepState, prompts: Prompts, chunk_size: int) -> None:
    """Brings a freshly loaded state to the point where every row looks as if a step had just
    committed its last prompt token.

    The target reads all but the last prompt token of each row. Features of a chunk go to the
    drafter and are dropped, so memory does not grow with the prompt; the last one stays for the
    first proposal.

    Args:
        parts: the target reads the prompts, the drafter follows with the features.
        state: updated in place.
        prompts: the batch.
        chunk_size: tokens per forward.
    """
    tokens, num_read = state.buffer.tokens, state.buffer.lengths.clone()  # [B, S], [B]
    longest = max(prompts.lengths) - 1
    for offset in range(0, longest, chunk_size):
        end = min(offset + chunk_size, longest)
        features = parts.target.prefill(state.cache, tokens[:, offset:end], num_read, offset=offset)
        context = Context(
            tokens=tokens[:, offset : end + 1],
            features=features,
            start=torch.full_like(num_read, offset),
            # The pair (feature of the last token read, last prompt token) is left to the first
            # proposal.
            num_new=(num_read - 1 - offset).clamp(-1, end - offset),
            num_attended=end + 1,
        )
        if state.signature.num_draft_tokens > 0:
            parts.drafter.prefill(context, state.drafter_state)
        if features is not None:
            index = num_read - 1 - offset
            is_here = (index >= 0) & (index < end - offset)
            rows = torch.arange(len(index), device=index.device)
            last = features[rows, index.clamp(0, end - offset - 1)]
            state.features[:, 0] = torch.where(is_here[:, None], last, state.features[:, 0])
