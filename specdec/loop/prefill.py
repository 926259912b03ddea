"""How prompts are read before the first step: in chunks.

Chunks read and write the tensors of one `StepState`, as steps do: nothing in them waits for the
device. `loop/replay.py` captures chunks of a few sizes.

Legend: B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specdec.loop.state import Parts, StepState

if TYPE_CHECKING:
    from specdec.targets.prompt_inputs import PromptChunk


def chunks(length: int, chunk_size: int) -> list[int]:
    """Sizes of the chunks that so many tokens are read in.

    Example:
        >>> chunks(5000, 2048)
        [2048, 2048, 904]
    """
    rest = length % chunk_size
    return [chunk_size] * (length // chunk_size) + [rest] * (rest > 0)


def prefill(
    state: StepState,
    sizes: Iterable[int],
    run_chunk: Callable[[int], None],
    *,
    fixed: Container[int] = (),
) -> None:
    """Brings a freshly loaded state to the point where every row looks as if a step had just
    committed its last prompt token.

    Args:
        state: updated in place.
        sizes: of the chunks, which together have all tokens of the longest prompt but its last one.
        run_chunk: `prefill_chunk` of the state, or a graph of it, given the chunk's size.
        fixed: chunks of these sizes attend over all slots, unless they are the first.
    """
    start = 0
    for size in sizes:
        state.chunk_start.fill_(start)
        most, is_fixed = state.cache.num_slots, start > 0 and size in fixed
        with state.narrowed(most if is_fixed else start + size + 1):
            run_chunk(size)
        start += size


def prefill_chunk(
    parts: Parts,
    state: StepState,
    size: int,
    *,
    prompt: PromptChunk | None = None,
    of_drafter: PromptChunk | None = None,
) -> None:
    """Reads the prompts' tokens of positions `chunk_start` to `chunk_start + size - 1`, in the rows
    that have them.

    The target reads all but the last prompt token of each row. Features of a chunk go to the
    drafter and are dropped, so memory does not grow with the prompt; the last one stays for the
    first proposal.

    Args:
        parts: the target reads the prompts, the drafter follows with the features.
        state: updated in place.
        size: tokens of the chunk.
        prompt: what the target reads in place of these tokens, where prompts are more than ids.
        of_drafter: the same of the drafter, with the token after the chunk.
    """
    buffer, start = state.buffer, state.chunk_start
    num_read = buffer.root_position  # [B], of the last prompt token
    positions = start + torch.arange(size + 1, device=start.device)
    known = positions.clamp(max=buffer.tokens.shape[1] - 1)
    tokens = buffer.tokens.index_select(1, known)  # [B, size + 1]
    read = tokens[:, :-1], num_read
    features = parts.target.prefill(state.cache, *read, offset=start, prompt=prompt)
    # The pair (feature of the last token read, last prompt token) is left to the first proposal.
    num_new = (num_read - 1 - start).clamp(-1, size)
    known = tokens, features, start.repeat(len(num_read)), num_new
    context = state.context_of(parts, *known, num_read=num_read.clamp(max=start + size))
    if of_drafter is not None:
        context = replace(context, prompt=of_drafter)
    if state.signature.num_draft_tokens > 0:
        try:
            parts.drafter.prefill(context, state.drafter_state)
        except AttributeError as error:
            from specdec.targets.text import refuse_unread_target

            refuse_unread_target(parts.drafter, error)
            raise
    if features is not None:
        index = num_read - 1 - start
        is_here = (index >= 0) & (index < size)
        rows = torch.arange(len(index), device=index.device)
        last = features[rows, index.clamp(0, size - 1)]
        state.features[:, 0] = torch.where(is_here[:, None], last, state.features[:, 0])
