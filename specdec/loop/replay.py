"""Steps and prompt chunks as graphs, replayed over the tensors of one storage. A generator without
graphs runs none of this.

Legend: B rows, K draft tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from specdec.graphs import Captured
from specdec.graphs.capture import CaptureError, GraphPool
from specdec.graphs.storage import stable_storage
from specdec.lab.show.text import draft_size
from specdec.loop.outcome import Outcome
from specdec.loop.prefill import chunks, prefill_chunk
from specdec.loop.state import Parts, StepState
from specdec.loop.step import step

NUM_EAGER = 3
"""Steps that run eagerly before the first one of a model is captured. After that one is enough."""
MAX_GRAPHS = 64
"""Graphs of one storage that are kept. Each takes some megabytes; every value of `top_k` has its
own."""
CAPTURED_CHUNKS = (64, 256, 512, 1024)
"""Tokens of the prompt chunks that are captured, ascending. A GPU reads 256 tokens in hardly more
time than it takes to read the weights; launching the same work eagerly takes ten times as long.
"""
MOST_CAPTURED_TOKENS = 16_384
"""Of all rows of a captured chunk together: what it computes in is kept as long as its graph."""
CHUNK_OVERHEAD = 128
"""A chunk takes, besides the arithmetic of its tokens, as long as that of so many more."""


class Replay:
    """A stepper that replays the steps of one storage as graphs, one for each set of options and
    draft length.

    The first steps run eagerly: they are steps of the generation as all others, and load every
    kernel and library that the capture needs. The last of them runs under `no_host_sync`. Capturing
    runs nothing, so a generation goes on where it was, and texts do not depend on when a step was
    captured. Prompt chunks of a few sizes are captured likewise.

    Args:
        parts, state: of the steps; the state's tensors stay where they are.
        must_capture: a failure is raised; else the steps stay eager, and `refusal` says why.
        is_first: nothing of the model was captured before.

    Attributes:
        state: of the call that was loaded last.
        refusal: why steps are eager although they were to be captured; `None` if they are not.
        captured_chunks: sizes of the prompt chunks that are captured; see `covering_chunks`.
    """

    def __init__(
        self,
        parts: Parts,
        state: StepState,
        *,
        must_capture: bool = False,
        is_first: bool = True,
    ):
        self.parts, self.state = parts, state
        self.refusal: str | None = None
        self._must_capture = must_capture
        self._num_before = NUM_EAGER if is_first else 1
        self._captured: dict[tuple, Captured] = {}
        self._num_eager: Counter[tuple] = Counter()
        self._pool = GraphPool(state.device)
        self._reading_refusal = parts.target.why_reading_waits
        rows = state.signature.batch_size
        self.captured_chunks = captured_sizes(rows) if self._reading_refusal is None else ()

    def __call__(self, state: StepState, num_draft_tokens: int) -> Outcome:
        """One step for every row of the loaded call.

        Raises:
            CaptureError: the step cannot be captured, and must be.
        """
        # The graph holds these functions, so they must not hold what holds the graph.
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

    def chunks(self, length: int, chunk_size: int) -> list[int]:
        """Sizes of the chunks that so many tokens are read in, each at most `chunk_size`."""
        rows = self.state.signature.batch_size
        return covering_chunks(length, chunk_size, self.captured_chunks, rows)

    def chunk_sizes(self, num_read: int, chunk_size: int) -> list[int]:
        """All sizes of the chunks that up to so many tokens are read in."""
        rows = self.state.signature.batch_size
        return chunk_sizes(num_read, chunk_size, self.captured_chunks, rows)

    def run_chunk(self, size: int) -> None:
        """Reads a chunk of the prompts that were loaded, as `prefill_chunk` does."""
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
    def num_runs(self) -> int:
        """So many of a step or a chunk, and it is captured."""
        return NUM_EAGER + 1

    @property
    def graphs(self) -> dict[int, Captured]:
        """The steps of the loaded call's options that are captured, by draft length."""
        own = self.state.signature
        return {key[1]: graph for key, graph in self._captured.items() if key[0] == own}

    @property
    def all_graphs(self) -> list[Captured]:
        """All that is captured: steps of every set of options, and prompt chunks."""
        return list(self._captured.values())

    def describe(self) -> Iterator[str]:
        """Lines that say how the steps run."""
        s, num_slots = self.state.signature, self.state.cache.num_slots
        size = draft_size(s.num_draft_tokens, s.tree_depth)
        where = f"batch of {s.batch_size}, {size}, {num_slots} slots"
        if self.refusal is not None:
            yield f"{where}: eager, because {self.refusal}"
        if self._reading_refusal is not None:
            yield f"{where}: prompts are read eagerly, because {self._reading_refusal}"
        for (kind, size, *in_use), captured in self._captured.items():
            what = f"{size} draft tokens"
            if kind == "chunk":
                order = "later" if in_use[0] == num_slots else "first"
                what = f"{order} prompt chunks of {size} tokens"
            yield (
                f"{where}: {what} captured in {captured.capture_seconds:.2f} s, "
                f"{captured.num_bytes / 2**20:.0f} MiB, {captured.num_calls} replays"
            )
        if not self._captured and self.refusal is None:
            yield f"{where}: to be captured after {self._num_before} steps"


def captured_sizes(rows: int) -> tuple[int, ...]:
    """Sizes of the chunks that are captured for a batch."""
    return tuple(size for size in CAPTURED_CHUNKS if rows * size <= MOST_CAPTURED_TOKENS)


def covering_chunks(
    length: int, chunk_size: int, captured: tuple[int, ...], rows: int = 1
) -> list[int]:
    """Sizes of the chunks that a prompt is read in where some sizes are captured.

    Args:
        length: tokens to read.
        chunk_size: the most tokens of a chunk.
        captured: sizes that there are graphs for, ascending. What is left after chunks of
            `chunk_size` is read in those of them that take the least time.
        rows: B.

    Example:
        >>> covering_chunks(2600, 2048, (64, 256))
        [2048, 256, 256, 64]
        >>> sizes = (64, 256, 1024)
        >>> covering_chunks(900, 2048, sizes), covering_chunks(700, 2048, sizes, rows=8)
        ([1024], [256, 256, 64, 64, 64])
    """
    captured = tuple(size for size in captured if size <= chunk_size)
    rest = length % chunk_size
    if not (captured and rest):
        return chunks(length, chunk_size)
    return chunks(length - rest, chunk_size) + _covering(rest, captured, CHUNK_OVERHEAD / rows)


def _covering(length: int, sizes: tuple[int, ...], overhead: float) -> list[int]:
    """Of these sizes, ascending, the chunks that read so many tokens in the least time: as many of
    the largest as are full, and for the rest one more or some that are smaller.
    """
    *smaller, size = sizes
    found, rest = [size] * (length // size), length % size
    if rest:
        ways = [[size], *([_covering(rest, smaller, overhead)] if smaller else [])]
        found += min(ways, key=lambda way: sum(way) + overhead * len(way))
    return found


def chunk_sizes(
    length: int, chunk_size: int, captured: tuple[int, ...], rows: int = 1
) -> list[int]:
    """All sizes of the chunks that at most so many tokens are read in. Without captured ones any
    size may come; for them stand the largest, and one token, which is compiled for itself.
    """
    if not captured and length:
        return sorted({1, min(length, chunk_size)})
    lengths = range(1, min(length, 2 * chunk_size) + 1)
    return sorted({s for n in lengths for s in covering_chunks(n, chunk_size, captured, rows)})
