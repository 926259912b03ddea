"""Who runs the steps: a `StepRunner` runs calls over one storage and replays their steps as graphs
where that is possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from specdec.graphs import Captured, CaptureError, GraphPool, stable_storage
from specdec.graphs.tree import size_bytes
from specdec.loop.outcome import Outcome
from specdec.loop.prefill import captured_sizes, chunk_sizes, prefill, prefill_chunk
from specdec.loop.state import Parts, Signature, StepState
from specdec.loop.step import step
from specdec.request import Request
from specdec.samplers import Warp
from specdec.show.text import draft_size

NUM_EAGER = 3
"""Steps that run eagerly before the first one of a model is captured. After that one is enough."""
MAX_GRAPHS = 64
"""Graphs of one storage that are kept. Each takes some megabytes; every value of `top_k` has its
own."""


class StepRunner:
    """Runs calls over one storage, one after the other, with a graph for each set of options and
    draft length.

    The first steps run eagerly: they are steps of the generation as all others, and load every
    kernel and library that the capture needs. The last of them runs under `no_host_sync`. Capturing
    runs nothing, so a generation goes on where it was, and texts do not depend on when a step was
    captured. Prompt chunks of a few sizes are captured likewise.

    Args:
        parts, state: of the steps; the state's tensors stay where they are.
        serves: what calls must share to run here, see `RunnerPool`.
        must_capture: a failure is raised; else the steps stay eager, and `refusal` says why.
        num_eager: steps that run eagerly before one is captured.

    Attributes:
        refusal: why steps are eager although they were to be captured; `None` if they are not.
        size_bytes: of the storage. What graphs take besides, a few per cent, differs between the
            processes of one target, which have to keep the same.
        captured_chunks: sizes of the prompt chunks that are captured; see `prefill.chunks`.
    """

    def __init__(
        self,
        parts: Parts,
        state: StepState,
        serves: tuple = (),
        *,
        must_capture: bool = False,
        num_eager: int = NUM_EAGER,
    ):
        self.parts, self.state, self.serves = parts, state, serves
        self.size_bytes, self.captures = size_bytes(state), state.signature.is_captured
        self.refusal: str | None = None
        self._must_capture, self._num_before = must_capture, num_eager
        self._warps: dict[Signature, Warp] = {state.signature: state.warp}
        self._captured: dict[tuple, Captured] = {}
        self._num_eager: Counter[tuple] = Counter()
        self._pool = GraphPool(state.device) if self.captures else None
        self._reading_refusal = parts.target.why_reading_waits if self.captures else None
        is_read_by_graphs = self.captures and self._reading_refusal is None
        rows = state.signature.batch_size
        self.captured_chunks = captured_sizes(rows) if is_read_by_graphs else ()
        self._is_idle: torch.cuda.Event | None = None

    def load(self, request: Request, signature: Signature) -> None:
        """Writes a call into the storage. A warp of other options is another set of tensors."""
        if signature not in self._warps:
            rows, device = signature.batch_size, self.state.device
            self._warps[signature] = Warp(rows, device=device, **request.filled_to(rows).warp)
        self.state = self.state.with_options(signature, self._warps[signature])
        self.state.load(request)

    def prefill(self, request: Request, chunk_size: int) -> None:
        """Reads the prompts of the call that was loaded, in chunks of at most so many tokens."""
        options = {"chunk_size": chunk_size, "captured": self.captured_chunks}
        prefill(self.state, request, self._run_chunk, **options)

    def warm_up(self, lengths: Iterable[int], num_read: int, chunk_size: int) -> None:
        """Runs steps of these draft lengths, and prompt chunks of all sizes that up to `num_read`
        tokens are read in, until nothing of them is left to compile or to capture.

        The call that is loaded has prompts of one token, and all of its rows have ended: nothing is
        read and nothing committed.
        """
        count = NUM_EAGER + 1 if self.captures else 1
        rows = self.state.signature.batch_size
        for size in chunk_sizes(num_read, chunk_size, self.captured_chunks, rows):
            for in_use in {min(size + 1, self.num_slots), self.num_slots}:  # first, and later
                with self.state.narrowed(in_use):
                    for _ in range(count):
                        self._run_chunk(size)
        for length in lengths:
            for _ in range(count):
                self(self.state, length)

    def __call__(self, state: StepState, num_draft_tokens: int) -> Outcome:
        """One step for every row of the runner's state.

        Raises:
            CaptureError: the step cannot be captured, and must be.
            ValueError: the state of a call that was closed: graphs know that of the loaded one.
        """
        if state is not self.state:
            raise ValueError(
                "this generation was closed, and its tensors are another call's; start a new one"
            )
        # The graph holds these functions, so they must not hold the runner that holds the graph.
        eager = partial(step, self.parts, state, num_draft_tokens)
        if self.refusal is not None:
            return eager()
        try:
            return self._through_graph((state.signature, num_draft_tokens), eager)
        except CaptureError as error:
            if self._must_capture:
                raise CaptureError(f"{error} (graphs=True; 'auto' goes on eagerly)") from error
            self.refusal = str(error)
        # Nothing was committed, and a drafter starts from what is: the step can be run again.
        return eager()

    def _run_chunk(self, size: int) -> None:
        run = partial(prefill_chunk, self.parts, self.state, size)
        if size not in self.captured_chunks:
            return run()
        try:
            self._through_graph(("chunk", size, self.state.cache.in_use), run)
        except CaptureError as error:  # a drafter may wait for the device while it reads
            self.captured_chunks, self._reading_refusal = (), str(error)
            run()

    def _through_graph(self, key: tuple, function: Callable[[], Any]) -> Any:
        """Runs a function of the state, by the graph that is kept for it once there is one.

        Raises:
            CaptureError: it cannot be captured.
            StorageMovedError: it replaces a tensor of the state.
        """
        if key not in self._captured:
            if self._num_eager[key] < self._num_before:
                self._num_eager[key] += 1
                return self._run_eagerly(function, self._num_eager[key] == self._num_before)
            if len(self._captured) == MAX_GRAPHS:
                del self._captured[next(iter(self._captured))]
            options = {"warmup": 0, "is_guarded": False, "device": self.state.device}
            self._captured[key] = Captured(function, pool=self._pool, **options)
            self._num_before = 1  # kernels and libraries are loaded
        return self._captured[key]()

    def _run_eagerly(self, function: Callable[[], Any], is_last: bool) -> Any:
        if not is_last:
            return self._pool.run(function)
        # Compiled code runs uncompiled under a guard, and would round otherwise in this one step.
        with stable_storage(self.state):  # a graph would go on with tensors that were replaced
            return self._pool.run(function, is_guarded=not self.parts.target.is_fused)

    @property
    def graphs(self) -> dict[int, Captured]:
        """The steps of the loaded call's options that are captured, by draft length."""
        own = self.state.signature
        return {key[1]: graph for key, graph in self._captured.items() if key[0] == own}

    @property
    def all_graphs(self) -> list[Captured]:
        """All that is captured: steps of every set of options, and prompt chunks."""
        return list(self._captured.values())

    @property
    def num_slots(self) -> int:
        """Slots of each row: what a call may need."""
        return self.state.cache.num_slots

    def describe(self) -> Iterator[str]:
        """Lines that say how the steps run."""
        s = self.state.signature
        size = draft_size(s.num_draft_tokens, s.tree_depth)
        where = f"batch of {s.batch_size}, {size}, {self.num_slots} slots"
        if not self.captures:
            return
        if self.refusal is not None:
            yield f"{where}: eager, because {self.refusal}"
        if self._reading_refusal is not None:
            yield f"{where}: prompts are read eagerly, because {self._reading_refusal}"
        for (kind, size, *in_use), captured in self._captured.items():
            what = f"{size} draft tokens"
            if kind == "chunk":
                order = "later" if in_use[0] == self.num_slots else "first"
                what = f"{order} prompt chunks of {size} tokens"
            yield (
                f"{where}: {what} captured in {captured.capture_seconds:.2f} s, "
                f"{captured.num_bytes / 2**20:.0f} MiB, {captured.num_calls} replays"
            )
        if not self._captured and self.refusal is None:
            yield f"{where}: to be captured after {self._num_before} steps"

    def park(self) -> None:
        """Notes how far the device has to come before another call may use the tensors: it may come
        from a thread that works on another stream.
        """
        if self.state.device.type == "cuda":
            self._is_idle = torch.cuda.Event()
            self._is_idle.record()

    def resume(self) -> None:
        """Lets the current stream wait for that."""
        if self._is_idle is not None:
            self._is_idle.wait()
