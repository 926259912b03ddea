"""`StepRunner`: runs the steps of one state, and replays them as graphs where that is possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from specdec.graphs import Captured, CaptureError, GraphPool, HostSyncError, no_host_sync
from specdec.graphs.capture import explain_failure
from specdec.loop.outcome import Outcome
from specdec.loop.state import StepState
from specdec.loop.step import EditLogits, Mark, Parts, device_step

NUM_EAGER = 3
"""Steps of each draft length that run eagerly before it is captured."""


class StepRunner:
    """Runs the steps of a state, one graph per draft length.

    The first steps of a draft length run eagerly, on the stream of the capture: they are steps of
    the generation as all others, and load every kernel and workspace that the capture needs. The
    last of them runs under `no_host_sync`. Capturing runs nothing, so a generation goes on where it
    was, and texts do not depend on when a step was captured.

    Args:
        parts: target, drafter and sampler.
        state: that the steps update; its tensors must stay where they are.
        captures: steps are to be captured.
        must_capture: a failure is raised; else the steps stay eager, and `refusal` says why.
        frozen: whatever a captured step has taken over from its parts besides.

    Attributes:
        refusal: why steps are eager although they were to be captured; `None` if they are not.
    """

    def __init__(
        self,
        parts: Parts,
        state: StepState,
        *,
        captures: bool,
        must_capture: bool = False,
        frozen: tuple = (),
    ):
        self.parts, self.state, self.captures, self.frozen = parts, state, captures, frozen
        self.refusal: str | None = None
        self._must_capture = must_capture
        self._pool = GraphPool(state.record.device) if captures else None
        self._captured: dict[int, Captured] = {}
        self._num_eager: Counter[int] = Counter()
        self._is_idle: torch.cuda.Event | None = None

    def run(
        self,
        state: StepState,
        *,
        num_draft_tokens: int,
        edit_logits: EditLogits | None = None,
        mark: Mark | None = None,
    ) -> Outcome:
        """One step; Args as `device_step`.

        Args:
            state: the runner's, or, where nothing is captured, one that holds some of its rows.
            num_draft_tokens, edit_logits, mark: as for `device_step`. What is captured takes no
                times.

        Raises:
            CaptureError: the step cannot be captured, and must be.
        """
        if not self.captures or self.refusal is not None:
            options = {"edit_logits": edit_logits, "mark": mark}
            return device_step(self.parts, state, num_draft_tokens=num_draft_tokens, **options)
        if num_draft_tokens not in self._captured:
            if self._num_eager[num_draft_tokens] < NUM_EAGER:
                return self._run_eagerly(num_draft_tokens)
            self._capture(num_draft_tokens)
            if self.refusal is not None:
                return self._step(num_draft_tokens)
        return self._captured[num_draft_tokens]()

    @property
    def graphs(self) -> dict[int, Captured]:
        """What is captured, by draft length."""
        return dict(self._captured)

    def describe(self) -> Iterator[str]:
        """Lines that say how the steps run."""
        s = self.state.signature
        where = f"batch of {s.batch_size}, K = {s.num_draft_tokens}, {s.num_slots} slots"
        if not self.captures:
            return
        if self.refusal is not None:
            yield f"{where}: eager, because {self.refusal}"
        for length, captured in sorted(self._captured.items()):
            yield (
                f"{where}: {length} draft tokens captured in {captured.capture_seconds:.2f} s, "
                f"{captured.num_bytes / 2**20:.0f} MiB, {captured.num_calls} replays"
            )
        if not self._captured and self.refusal is None:
            yield f"{where}: to be captured after {NUM_EAGER} steps"

    def park(self) -> None:
        """Notes how far the device has to come before another call may use the tensors: it may come
        from a thread that works on another stream.
        """
        if self.state.record.is_cuda:
            self._is_idle = torch.cuda.Event()
            self._is_idle.record()

    def resume(self) -> None:
        """Lets the current stream wait for that."""
        if self._is_idle is not None:
            self._is_idle.wait()

    def _step(self, num_draft_tokens: int) -> Outcome:
        return device_step(self.parts, self.state, num_draft_tokens=num_draft_tokens)

    def _run_eagerly(self, num_draft_tokens: int) -> Outcome:
        self._num_eager[num_draft_tokens] += 1
        is_last = self._num_eager[num_draft_tokens] == NUM_EAGER
        # Compiled code runs uncompiled under a guard, and would round otherwise in this one step.
        if not is_last or self.parts.target.is_fused:
            return self._pool.run(lambda: self._step(num_draft_tokens))
        try:
            with no_host_sync():
                return self._pool.run(lambda: self._step(num_draft_tokens))
        except HostSyncError as error:
            self._refuse(explain_failure(error), error)
        # Nothing was committed, and a drafter starts from what is: the step can be run again.
        return self._step(num_draft_tokens)

    def _capture(self, num_draft_tokens: int) -> None:
        try:
            self._captured[num_draft_tokens] = Captured(
                lambda: self._step(num_draft_tokens),
                pool=self._pool,
                warmup=0,
                device=self.state.record.device,
            )
        except CaptureError as error:
            self._refuse(str(error), error)

    def _refuse(self, reason: str, error: Exception) -> None:
        if self._must_capture:
            raise CaptureError(f"{reason} (graphs=True; 'auto' goes on eagerly)") from error
        self.refusal = reason
