"""`EagerTwin`: the same generation once more, without graphs, to compare every step with."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.graphs import stable_storage
from specdec.loop.generation import Generation
from specdec.loop.outcome import record_columns
from specdec.loop.prefill import prefill, prefill_chunk
from specdec.loop.state import StepState
from specdec.loop.step import device_step


class ReplayMismatchError(RuntimeError):
    """A replayed step did something else than the same step run eagerly."""


class EagerTwin:
    """Runs every step of a generation eagerly, on tensors of its own.

    Faults of a captured step rarely raise anything: a length that no kernel advances, or a tensor
    that Python replaced, shows as other tokens, or only as lower acceptance at later positions. The
    twin starts from the same prompts, takes the same steps, and all that a step reports is compared
    after each.

    Args:
        generation: at its start; its prompts have been read and no step was taken.
        chunk_size: see `prefill`.
    """

    @torch.inference_mode()
    def __init__(self, generation: Generation, chunk_size: int):
        self._generation, request = generation, generation.request
        self._parts, theirs = generation.runner.parts, generation.whole
        target, drafter, sampler = self._parts.target, self._parts.drafter, self._parts.sampler
        self._state = StepState.allocate(
            theirs.signature, theirs.num_slots, target, drafter, sampler, request
        )
        self._state.load(request)
        prefill(
            self._state,
            request,
            lambda *chunk: prefill_chunk(self._parts, self._state, *chunk),
            chunk_size=chunk_size,
            captured=generation.runner.captured_chunks,
        )
        self._storage = stable_storage(theirs)
        self._num_steps = 0
        self._num_ended = 0

    @torch.inference_mode()
    def follow(self) -> None:
        """Takes the step that the generation has just taken, and compares.

        Raises:
            ReplayMismatchError: the two differ; the message names step, row and quantity.
            StorageMovedError: the step moved one of its tensors.
        """
        generation, mine, theirs = self._generation, self._state, self._generation.whole
        self._end_rows()
        outcome = device_step(self._parts, mine, num_draft_tokens=generation.num_draft_tokens)
        self._storage.check()
        width = mine.signature.num_draft_tokens
        for name, columns in record_columns(width).items():
            self._compare(name, theirs.record[:, columns], outcome.record[:, columns])
        self._compare("lengths", theirs.buffer.lengths, mine.buffer.lengths)
        self._compare("remaining tokens", theirs.buffer.remaining, mine.buffer.remaining)
        self._compare("anchors", theirs.buffer.anchor, mine.buffer.anchor)
        self._num_steps += 1

    def _end_rows(self) -> None:
        """Ends the rows that the host has ended before this step."""
        ended = self._generation.ended_by_host[self._num_ended :]
        self._num_ended += len(ended)
        if ended:
            self._state.buffer.remaining[ended] = 0

    def _compare(self, name: str, replayed: Tensor, eager: Tensor) -> None:
        count = len(self._generation.rows)
        replayed, eager = replayed[:count].cpu(), eager[:count].cpu()
        if torch.equal(replayed, eager):
            return
        row = int((replayed != eager).view(count, -1).any(dim=1).long().argmax())
        raise ReplayMismatchError(
            f"step {self._num_steps}, row {row}: {name} are {replayed[row].tolist()} replayed and "
            f"{eager[row].tolist()} run eagerly; something that the step reads or writes is not "
            "what it was at capture (a tensor bound to a new one, a number of the host, a value "
            "computed once)"
        )
