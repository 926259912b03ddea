"""How prompts that are more than ids are read before the first step."""

from __future__ import annotations

import torch

from specdec.loop.prefill import prefill, prefill_chunk
from specdec.loop.state import Parts, StepState
from specdec.request.call import Request
from specdec.targets.prompt_inputs import PromptChunk


def prefill_inputs(parts: Parts, state: StepState, request: Request, chunk_size: int) -> None:
    """As `prefill`, for prompts that are more than ids; their chunks are read eagerly.

    Args:
        parts, state: as of `prefill_chunk`.
        request: the call, with `prompt_inputs`.
        chunk_size: the most tokens of a chunk, but where tokens see later ones.

    Raises:
        OutOfMemoryError: as torch's own, and what it was that could not be read in chunks.
    """
    rows, prompts = state.signature.batch_size, request.prompt_inputs
    chunks = prompts.filled_to(rows).chunks(chunk_size)
    drafters = parts.drafter.read_prompts(prompts, request.read_prompts)
    drafters = drafters and drafters.filled_to(rows)
    rest = iter(chunks)

    def run_chunk(size: int) -> None:
        chunk = next(rest)
        # A drafter reads the token after the chunk, too.
        own = drafters and PromptChunk(drafters, chunk.start, size + 1)
        prefill_chunk(parts, state, size, prompt=chunk, of_drafter=own)

    try:
        prefill(state, [chunk.size for chunk in chunks], run_chunk)
    except torch.OutOfMemoryError as error:
        if note := request.prompt_inputs.uncut_note:
            raise torch.OutOfMemoryError(f"{error}; {note}") from error
        raise
