"""Who runs the steps: a `StepRunner` runs calls over one storage and replays their steps as graphs
where that is possible; the `RunnerPool` of a generator chooses the storage of each call.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import partial
from typing import Any, Literal

import torch

from specdec.drafters.base import Drafter
from specdec.graphs import Captured, CaptureError, GraphPool, weight_addresses
from specdec.loop.outcome import Outcome
from specdec.loop.state import Parts, Signature, StepState, bucket_of_rows
from specdec.loop.step import (
    CAPTURED_CHUNKS,
    EditLogits,
    device_step,
    prefill,
    prefill_chunk,
)
from specdec.request import Request
from specdec.samplers import Warp
from specdec.show.text import draft_size
from specdec.target import Target
from specdec.target.cache import memory_bytes
from specdec.target.hf_model import SlotModel

NUM_EAGER = 3
"""Steps that run eagerly before the first one of a model is captured. After that one is enough."""
MAX_GRAPHS = 64
"""Graphs of one storage that are kept. Each takes some megabytes; every value of `top_k` has its
own."""
FIRST_TOKENS = 2048
"""Tokens of all rows together that captured storage has room for at least."""
SLOT_MULTIPLE = 64
"""Numbers of slots are multiples of this."""


class StepRunner:
    """Runs calls over one storage, one after the other, with a graph for each set of options and
    draft length.

    The first steps run eagerly, on the stream of the capture: they are steps of the generation as
    all others, and load every kernel and workspace that the capture needs. The last of them runs
    under `no_host_sync`. Capturing runs nothing, so a generation goes on where it was, and texts do
    not depend on when a step was captured. Prompt chunks of a few sizes are captured likewise.

    Args:
        parts, state: of the steps; the state's tensors stay where they are.
        serves: what calls must share to run here, see `RunnerPool`.
        must_capture: a failure is raised; else the steps stay eager, and `refusal` says why.
        num_eager: steps that run eagerly before one is captured.

    Attributes:
        refusal: why steps are eager although they were to be captured; `None` if they are not.
        size_bytes: of the storage. What graphs take besides, a few per cent, differs between the
            processes of one target, which have to keep the same.
        captured_chunks: sizes of the prompt chunks that are captured; see `step.chunks`.
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
        self.size_bytes, self.captures = state.size_bytes, state.signature.is_captured
        self.refusal: str | None = None
        self._must_capture, self._num_before = must_capture, num_eager
        self._warps: dict[Signature, Warp] = {state.signature: state.warp}
        self._captured: dict[tuple, Captured] = {}
        self._num_eager: Counter[tuple] = Counter()
        self._pool = GraphPool(state.record.device) if self.captures else None
        self._reading_refusal = parts.target.why_reading_waits if self.captures else None
        is_read_by_graphs = self.captures and self._reading_refusal is None
        self.captured_chunks = CAPTURED_CHUNKS if is_read_by_graphs else ()
        self._is_idle: torch.cuda.Event | None = None

    def load(self, request: Request, signature: Signature) -> None:
        """Writes a call into the storage. A warp of other options is another set of tensors."""
        if signature not in self._warps:
            rows, device = signature.batch_size, self.state.record.device
            options = request.filled_to(rows).options
            self._warps[signature] = Warp(rows, device=device, **options.warp)
        self.state = self.state.with_options(signature, self._warps[signature])
        self.state.load(request)

    def prefill(self, request: Request, chunk_size: int) -> None:
        """Reads the prompts of the call that was loaded, in chunks of at most so many tokens."""
        options = {"chunk_size": chunk_size, "captured": self.captured_chunks}
        prefill(self.state, request, self._run_chunk, **options)

    def run(
        self, state: StepState, *, num_draft_tokens: int, edit_logits: EditLogits | None = None
    ) -> Outcome:
        """One step; Args as `device_step`. The state is the runner's or, where nothing is captured,
        one that holds some of its rows.

        Raises:
            CaptureError: the step cannot be captured, and must be.
        """
        if not self.captures or self.refusal is not None:
            options = {"num_draft_tokens": num_draft_tokens, "edit_logits": edit_logits}
            return device_step(self.parts, state, **options)

        # The graph holds these functions, so they must not hold the runner that holds the graph.
        step = partial(device_step, self.parts, self.state, num_draft_tokens=num_draft_tokens)
        try:
            return self._through_graph((self.state.signature, num_draft_tokens), step)
        except CaptureError as error:
            if self._must_capture:
                raise CaptureError(f"{error} (graphs=True; 'auto' goes on eagerly)") from error
            self.refusal = str(error)
        # Nothing was committed, and a drafter starts from what is: the step can be run again.
        return step()

    def _run_chunk(self, size: int, num_attended: int) -> None:
        run = partial(prefill_chunk, self.parts, self.state, size, num_attended)
        if size not in self.captured_chunks:
            return run()
        try:
            self._through_graph(("chunk", size), run)
        except CaptureError as error:  # a drafter may wait for the device while it reads
            self.captured_chunks, self._reading_refusal = (), str(error)
            run()

    def _through_graph(self, key: tuple, function: Callable[[], Any]) -> Any:
        """Runs a function of the state, by the graph that is kept for it once there is one.

        Raises:
            CaptureError: it cannot be captured.
        """
        if key not in self._captured:
            if self._num_eager[key] < self._num_before:
                self._num_eager[key] += 1
                return self._run_eagerly(function, self._num_eager[key] == self._num_before)
            if len(self._captured) == MAX_GRAPHS:
                del self._captured[next(iter(self._captured))]
            options = {"pool": self._pool, "warmup": 0, "device": self.state.record.device}
            self._captured[key] = Captured(function, **options)
            self._num_before = 1  # kernels and libraries are loaded
        return self._captured[key]()

    def _run_eagerly(self, function: Callable[[], Any], is_last: bool) -> Any:
        # Compiled code runs uncompiled under a guard, and would round otherwise in this one step.
        is_guarded = is_last and not self.parts.target.is_fused
        return self._pool.run(function, is_guarded=is_guarded)

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
        for (kind, size), captured in self._captured.items():
            what = f"prompt chunks of {size} tokens" if kind == "chunk" else f"{size} draft tokens"
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
        if self.state.record.is_cuda:
            self._is_idle = torch.cuda.Event()
            self._is_idle.record()

    def resume(self) -> None:
        """Lets the current stream wait for that."""
        if self._is_idle is not None:
            self._is_idle.wait()


class RunnerPool:
    """The runners of a generator that wait for a call, the latest last, as many as fit into a
    number of bytes; any thread may use them.

    A runner serves a call of the same parts, batch size, K and settings of the parts, whatever its
    options are, if its storage has the slots.

    Args:
        target: of the generator.
        graphs: whether steps are captured; as for `SpeculativeGenerator`.
        kept_bytes: that waiting runners may hold; `None` is a quarter of the device's memory.
    """

    def __init__(self, target: Target, *, graphs: bool | Literal["auto"], kept_bytes: int | None):
        self._must_capture, self._device = graphs is True, target.device
        self._reason = None if graphs is True else _why_never(target, graphs)
        self._last_reason: str | None = None
        if kept_bytes is None:
            kept_bytes = (memory_bytes(target.device) or 2**32) // 4
        self._kept_bytes = kept_bytes
        self._waiting: list[StepRunner] = []
        # Callbacks of Python's collector append here, at any moment: a lock could be held already.
        self._returned: deque[StepRunner] = deque()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict:
        """Tensors and graphs that are kept for the next call are no part of a pickled generator."""
        return {**vars(self), "_waiting": [], "_returned": deque(), "_lock": None}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def __iter__(self) -> Iterator[StepRunner]:
        with self._lock:
            self._collect()
            return iter(list(self._waiting))

    def why_eager(self, request: Request, *, is_traced: bool = False) -> str | None:
        """Why the steps of a call are not captured; `None` if they are."""
        if self._reason is not None:
            return self._reason
        if is_traced:
            return "a trace takes the time of every part of a step"
        if request.options.processors:
            names = ", ".join(type(p).__name__ for p in request.options.processors)
            return f"logits processors are host code, which every step has to wait for: {names}"
        return None

    def describe(self) -> Iterator[str]:
        """Lines that say how steps run."""
        if self._reason is not None:
            yield f"steps are eager: {self._reason}"
            return
        yield f"steps are captured on {self._device}"
        if self._last_reason:
            yield f"the last call was eager: {self._last_reason}"
        runners = list(self)
        for runner in runners:
            yield from (f"  {line}" for line in runner.describe())
        kept = sum(runner.size_bytes for runner in runners) / 2**20
        yield f"kept for later calls: {kept:.0f} MiB, of at most {self._kept_bytes / 2**20:.0f} MiB"

    def take(self, parts: Parts, request: Request, *, why_eager: str | None) -> StepRunner:
        """A runner for one call, for its caller alone, with the call loaded: the latest that waits
        and has room for it, else a new one.
        """
        self._last_reason, captures = why_eager, why_eager is None
        signature = signature_of(parts, request, captures)
        of_any_options = signature._replace(warp=(), wants_probs=False)
        serves = parts, of_any_options, _frozen_values(parts, captures)
        length = max(request.prompts.lengths) + request.max_new_tokens
        num_slots = length + signature.num_draft_tokens + 1
        with self._lock:
            self._collect()
            num_eager = 1 if any(r.all_graphs for r in self._waiting) else NUM_EAGER
            alike = [runner for runner in self._waiting if runner.serves == serves]
            runner = next((r for r in reversed(alike) if r.num_slots >= num_slots), None)
            if runner is not None:
                self._waiting.remove(runner)
            elif alike:  # the new one will serve the calls of the largest, too
                self._waiting.remove(max(alike, key=lambda runner: runner.num_slots))
        if runner is None:
            least = FIRST_TOKENS // signature.batch_size
            wanted = max((2 * r.num_slots for r in alike), default=least) if captures else 0
            del alike
            state = self._allocate(parts, request, signature, num_slots, wanted)
            options = {"must_capture": self._must_capture, "num_eager": num_eager}
            runner = StepRunner(parts, state, serves, **options)
        runner.resume()
        runner.load(request, signature)
        return runner

    def _allocate(
        self, parts: Parts, request: Request, signature: Signature, needed: int, wanted: int
    ) -> StepState:
        """Storage of `wanted` slots, or of those that are needed where that is more, or where the
        target has no positions or the device no memory for so many.
        """
        if parts.target.max_positions is not None:
            most = parts.target.max_positions + signature.num_draft_tokens + 1
            wanted = min(wanted, most)

        def allocate(count: int) -> StepState:
            num_slots = -(-count // SLOT_MULTIPLE) * SLOT_MULTIPLE
            return StepState.allocate(signature, num_slots, parts, request)

        try:
            return allocate(max(wanted, needed))
        except (torch.OutOfMemoryError, ValueError):  # or `check_room` says so before
            self.clear()
        return allocate(needed)

    def give(self, runner: StepRunner) -> None:
        """Takes a runner back, for later calls; may be called at any moment, by any thread."""
        runner.park()
        self._returned.append(runner)

    def _collect(self) -> None:
        """Moves runners that came back to those that wait, and gives up the oldest where all are
        more than may be kept.
        """
        while self._returned:
            self._waiting.append(self._returned.popleft())
        while self._waiting and sum(r.size_bytes for r in self._waiting) > self._kept_bytes:
            del self._waiting[0]

    def clear(self) -> None:
        """Frees all of them."""
        with self._lock:
            self._collect()
            self._waiting.clear()


def _why_never(target: Target, graphs: bool | Literal["auto"]) -> str | None:
    """Why no step of a generator is captured, where it need not be."""
    if graphs is False:
        return "graphs=False"
    if target.device.type != "cuda":
        kind = target.device.type.upper()
        return f"the target is on a {kind} (graphs=True replays there, too, for tests)"
    devices = sorted({str(p.device) for p in target.model.parameters()})
    if len(devices) > 1:
        return f"the target is spread over {', '.join(devices)}, and a graph runs on one device"
    return None


def signature_of(parts: Parts, request: Request, captures: bool) -> Signature:
    """Of a call; where steps are captured, rows are filled up to a bucket."""
    rows, options = len(request.prompts.lengths), request.options
    return Signature(
        batch_size=bucket_of_rows(rows) if captures else rows,
        num_draft_tokens=parts.drafter.num_draft_tokens,
        tree_depth=parts.drafter.tree_depth,
        warp=Warp(rows, **options.warp).signature,
        wants_probs=options.draft_probs and parts.sampler.uses_draft_probs,
        is_captured=captures,
    )


def _frozen_values(parts: Parts, captures: bool) -> tuple:
    """What storage has taken over from its parts: data types of weights, settings of drafter and
    sampler; and captured steps besides: addresses of weights. Where one differs, both are made
    again.
    """
    drafters = [part for part in parts.drafter.modules() if isinstance(part, Drafter)]
    settings = [item for part in (*drafters, parts.sampler) for item in vars(part).items()]
    plain = (int, float, str, type(None))
    kept = [(n, v) for n, v in settings if isinstance(v, plain) or is_dataclass(v)]
    models = [value.choices for _, value in settings if isinstance(value, SlotModel)]
    dtypes = sorted({str(weight.dtype) for weight in parts.drafter.parameters()})
    modules = parts.target.model, parts.drafter, parts.sampler
    addresses = weight_addresses(*modules) if captures else ()
    return parts.target.choices, *models, *addresses, *dtypes, *map(repr, kept)
