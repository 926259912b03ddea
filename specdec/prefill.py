"""Reads the prompts into the target and the drafter, chunk by chunk."""

import torch

from specdec.drafters.base import Drafter
from specdec.state import GenerationState
from specdec.target import Target
from specdec.types import Context


def prefill(target: Target, drafter: Drafter, state: GenerationState, chunk_size: int) -> None:
    """Brings a fresh state to the point where every row looks as if a step had just committed its
    last prompt token.

    The target reads all but the last prompt token of each row. Features of a chunk go to the
    drafter and are dropped, so memory does not grow with the prompt; the last one stays for the
    first proposal.

    Args:
        target: reads the prompts.
        drafter: follows with the features.
        state: fresh from `GenerationState.begin`; updated in place.
        chunk_size: tokens per forward.
    """
    num_read = torch.tensor(state.prompts.lengths, device=state.tokens.device) - 1  # [B]
    longest = state.longest - 1
    for offset in range(0, longest, chunk_size):
        end = min(offset + chunk_size, longest)
        features = target.prefill(
            state.cache, state.tokens[:, offset:end], num_read, offset=offset, reach=end
        )
        context = Context(
            tokens=state.tokens[:, offset : end + 1],
            features=features,
            start=torch.full_like(num_read, offset),
            # The pair (feature of the last token read, last prompt token) is left to the first
            # proposal.
            num_new=(num_read - 1 - offset).clamp(-1, end - offset),
            longest=end + 1,
        )
        drafter.prefill(context, state.drafter_state)
        if features is not None:
            index = num_read - 1 - offset
            is_here = (index >= 0) & (index < end - offset)
            rows = torch.arange(len(index), device=index.device)
            last = features[rows, index.clamp(0, end - offset - 1)]
            state.features[:, 0] = torch.where(is_here[:, None], last, state.features[:, 0])
