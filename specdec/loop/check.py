"""`EagerTwin`: the same generation once more, without graphs, to compare every step with."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import torch

from specdec.graphs.storage import stable_storage
from specdec.loop.host import Generation
from specdec.loop.new_storage import allocated
from specdec.loop.outcome import Outcome
from specdec.loop.prefill import prefill, prefill_chunk
from specdec.loop.prefill_inputs import prefill_inputs
from specdec.loop.state import StepState
from specdec.loop.step import step
from specdec.row_step import RowStep


class ReplayMismatchError(RuntimeError):
    """A replayed step did something else than the same step run eagerly."""


class EagerTwin:
    """A stepper that takes every step of a call twice: eagerly on tensors of its own, and by
    another stepper, which replays it.

    Faults of a captured step rarely raise anything: a length that no kernel advances, or a tensor
    that Python replaced, shows as other tokens, or only as lower acceptance at later positions. The
    twin starts from the same prompts, and all that a step reports is compared after each.

    Args:
        generation: at its start; its prompts have been read and no step was taken.
        chunk_size: see `prefill`.
    """

    @torch.inference_mode()
    def __init__(self, generation: Generation, chunk_size: int):
        storage, request = generation.storage, generation.request
        theirs, self._parts, self._stepper = storage.state, storage.parts, generation.stepper
        self._num_rows = len(request.lengths)
        self._storage, self._num_steps = stable_storage(theirs), 0
        self._state = allocated(theirs.signature, theirs.cache.num_slots, self._parts, request)
        self._state.load(request)
        if request.prompt_inputs is not None:
            prefill_inputs(self._parts, self._state, request, chunk_size)
            return
        sizes = storage.chunks(max(request.lengths) - 1, chunk_size)
        run_chunk = partial(prefill_chunk, self._parts, self._state)
        prefill(self._state, sizes, run_chunk, fixed=storage.fixed_chunks)

    def __call__(self, state: StepState, num_draft_tokens: int) -> Outcome:
        """One step for every row, taken twice and compared.

        Raises:
            ReplayMismatchError: the two differ; the message names step, row and quantity.
            StorageMovedError: the step moved one of its tensors.
        """
        mine = self._state
        has_ended = state.buffer.remaining == 0  # by a stopping criterion, too
        mine.buffer.remaining.masked_fill_(has_ended, 0)
        eager = step(self._parts, mine, num_draft_tokens)
        replayed = self._stepper(state, num_draft_tokens)
        self._storage.check()
        expected = _report(eager.of_rows(self._num_rows), mine)
        for name, found in _report(replayed.of_rows(self._num_rows), state).items():
            self._compare(name, found, expected[name])
        self._num_steps += 1
        return replayed

    def _compare(self, name: str, replayed: list[Any], eager: list[Any]) -> None:
        for row, (found, expected) in enumerate(zip(replayed, eager, strict=True)):
            if found != expected:
                raise ReplayMismatchError(
                    f"step {self._num_steps}, row {row}: {name} are {found} replayed and {expected}"
                    " run eagerly; something that the step reads or writes is not what it was at "
                    "capture (a tensor bound to a new one, a number of the host, a value computed "
                    "once)"
                )


def _report(outcome: Outcome, state: StepState) -> dict[str, list[Any]]:
    """All that a step says of each row, and how far the row has come; waits for the device."""
    buffer, rows = state.buffer, outcome.fetch().read()
    # Outputs may be of other kernels' rounding; the tokens are not.
    names = [f.name for f in fields(RowStep) if f.name != "outputs"]
    report = {name: [getattr(row, name) for row in rows] for name in names}
    own = {"position": buffer.root_position, "remaining": buffer.remaining}
    own["root"] = buffer.root
    return report | {name: values[: len(rows)].tolist() for name, values in own.items()}
