"""The tensors of a generator's calls: a `Storage` serves one call after the other, a `StoragePool`
keeps those that wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from specdec import processes
from specdec.drafters.base import Drafter
from specdec.graphs.tree import modules_of, size_bytes, weight_addresses
from specdec.loop.prefill import chunks, prefill, prefill_chunk, prefill_inputs
from specdec.loop.state import Parts, Signature, StepState, bucket_of_rows
from specdec.loop.step import Stepper, step
from specdec.request.call import Request
from specdec.samplers import LogitsFilter
from specdec.slots.room import memory_bytes
from specdec.targets import Target
from specdec.targets.slot_model import SlotModel
from specdec.torch_names import parameters_of

if TYPE_CHECKING:
    from specdec.loop.replay import Replay

FIRST_TOKENS = 2048
"""Tokens of all rows together that captured storage has room for at least."""
STORAGE_MULTIPLE = 64
"""Numbers of slots are multiples of this."""


class Storage:
    """The tensors of one call after the other, and the graphs that were captured over them.

    Args:
        parts, state: of the calls; the state's tensors stay where they are.
        serves: what calls must share to run here, see `StoragePool`.
        replay: of the state, where steps are captured; `None` where all are eager.

    Attributes:
        size_bytes: of the state. What graphs take besides, a few per cent, differs between the
            processes of one target, which have to keep the same.
        stepper: takes the steps of the loaded call.
    """

    def __init__(self, parts: Parts, state: StepState, serves: tuple, replay: Replay | None):
        self.parts, self.state, self.serves, self.replay = parts, state, serves, replay
        self.stepper: Stepper = partial(step, parts) if replay is None else replay
        self.size_bytes = size_bytes(state)
        self._filters: dict[Signature, LogitsFilter] = {state.signature: state.logits_filter}
        self._is_idle: torch.cuda.Event | None = None

    @property
    def num_slots(self) -> int:
        """Slots of each row: what a call may need."""
        return self.state.cache.num_slots

    def load(self, request: Request, signature: Signature) -> None:
        """Writes a call into the storage. A filter of other options is another set of tensors."""
        if signature not in self._filters:
            rows, device = signature.batch_size, self.state.device
            self._filters[signature] = LogitsFilter(
                rows, device=device, **request.filled_to(rows).logits_filter
            )
        self.state = self.state.with_options(signature, self._filters[signature])
        if self.replay is not None:
            self.replay.state = self.state
        self.state.load(request)

    def prefill(self, request: Request, chunk_size: int) -> None:
        """Reads the prompts of the call that was loaded, in chunks of at most so many tokens."""
        if request.prompt_inputs is not None:
            prefill_inputs(self.parts, self.state, request, chunk_size)
            return
        sizes = self.chunk_sizes(request, chunk_size)
        fixed = () if self.replay is None else self.replay.captured_chunks
        prefill(self.state, sizes, self.run_chunk, fixed=fixed)

    def chunk_sizes(self, request: Request, chunk_size: int) -> list[int]:
        """Sizes of the chunks that the prompts of a call are read in."""
        if request.prompt_inputs is not None:
            return request.prompt_inputs.chunk_sizes(chunk_size)
        length, own = max(request.lengths) - 1, self.replay
        return chunks(length, chunk_size) if own is None else own.chunks(length, chunk_size)

    def run_chunk(self, size: int) -> None:
        """Reads a chunk of so many tokens of the prompts that were loaded."""
        if self.replay is not None:
            return self.replay.run_chunk(size)
        prefill_chunk(self.parts, self.state, size)

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


class StoragePool:
    """The storages of a generator that wait for a call, the latest last, as many as fit into a
    number of bytes; any thread may use them.

    A storage serves a call of the same parts, batch size, K and settings of the parts, whatever its
    options are, if it has the slots.

    Args:
        target: of the generator.
        graphs: whether steps are captured; as for `SpeculativeGenerator`.
        kept_bytes: that waiting storages may hold; `None` is a quarter of the device's memory.
    """

    def __init__(self, target: Target, *, graphs: bool | Literal["auto"], kept_bytes: int | None):
        self._must_capture, self._device = graphs is True, target.device
        self._reason = None if graphs is True else _why_never(target, graphs)
        self._last_reason: str | None = None
        if kept_bytes is None:
            kept_bytes = (memory_bytes(target.device) or 2**32) // 4
        self._kept_bytes = kept_bytes
        self._waiting: list[Storage] = []
        # Callbacks of Python's collector append here, at any moment: a lock could be held already.
        self._returned: deque[Storage] = deque()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict:
        """Tensors and graphs that are kept for the next call are no part of a pickled generator."""
        return {**vars(self), "_waiting": [], "_returned": deque(), "_lock": None}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def __iter__(self) -> Iterator[Storage]:
        with self._lock:
            self._collect()
            return iter(list(self._waiting))

    def why_eager(self, request: Request, *, is_traced: bool = False) -> str | None:
        """Why the steps of a call are not captured; `None` if they are."""
        if self._reason is not None:
            return self._reason
        if is_traced:
            return "a trace takes the time of every part of a step"
        if request.processors:
            names = ", ".join(type(p).__name__ for p in request.processors[0][1])
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
        waiting = list(self)
        for replay in (storage.replay for storage in waiting):
            yield from (f"  {line}" for line in (replay.describe() if replay is not None else ()))
        kept = sum(storage.size_bytes for storage in waiting) / 2**20
        yield f"kept for later calls: {kept:.0f} MiB, of at most {self._kept_bytes / 2**20:.0f} MiB"

    def take(self, parts: Parts, request: Request, *, why_eager: str | None) -> Storage:
        """A storage for one call, for its caller alone, with the call loaded: the latest that waits
        and has room for it, else a new one.
        """
        self._last_reason, captures = why_eager, why_eager is None
        signature = signature_of(parts, request, captures)
        of_any_options = signature._replace(logits_filter=(), wants_probs=False, outputs=())
        serves = parts, of_any_options, _frozen_values(parts, captures)
        length = max(request.lengths) + request.max_new_tokens
        num_slots = length + signature.num_behind
        with self._lock:
            self._collect()
            has_graphs = any(s.replay is not None and s.replay.all_graphs for s in self._waiting)
            alike = [storage for storage in self._waiting if storage.serves == serves]
            storage = next((s for s in reversed(alike) if s.num_slots >= num_slots), None)
            if storage is not None:
                self._waiting.remove(storage)
            elif alike:  # the new one will serve the calls of the largest, too
                self._waiting.remove(max(alike, key=lambda storage: storage.num_slots))
        if storage is None:
            least = FIRST_TOKENS // signature.batch_size
            wanted = max((2 * s.num_slots for s in alike), default=least) if captures else 0
            del alike
            state, replay = self._allocate(parts, request, signature, num_slots, wanted), None
            if captures:
                from specdec.loop.replay import Replay  # which no other call needs

                options = {"must_capture": self._must_capture, "is_first": not has_graphs}
                replay = Replay(parts, state, **options)
            storage = Storage(parts, state, serves, replay)
        storage.resume()
        storage.load(request, signature)
        return storage

    def _allocate(
        self, parts: Parts, request: Request, signature: Signature, needed: int, wanted: int
    ) -> StepState:
        """Storage of `wanted` slots, or of those that are needed where that is more, or where the
        target has no positions or the device no memory for so many.
        """
        if parts.target.max_positions is not None:
            most = parts.target.max_positions + signature.num_behind
            wanted = min(wanted, most)

        def allocate(count: int) -> StepState:
            num_slots = -(-count // STORAGE_MULTIPLE) * STORAGE_MULTIPLE
            return StepState.allocate(signature, num_slots, parts, request)

        try:
            return allocate(max(wanted, needed))
        except (torch.OutOfMemoryError, ValueError):  # or `check_room` says so before
            self.clear()
        return allocate(needed)

    def give(self, storage: Storage) -> None:
        """Takes a storage back, for later calls; may be called at any moment, by any thread."""
        storage.park()
        self._returned.append(storage)

    def _collect(self) -> None:
        """Moves storages that came back to those that wait, and gives up the oldest where all are
        more than may be kept.
        """
        while self._returned:
            self._waiting.append(self._returned.popleft())
        while self._waiting and sum(s.size_bytes for s in self._waiting) > self._kept_bytes:
            del self._waiting[0]

    def check_kept(self, storage: Storage) -> None:
        """Raises `ValueError` for a storage that will not be kept for another call."""
        if storage.size_bytes > self._kept_bytes:
            raise ValueError(
                f"kept_bytes is {self._kept_bytes}, and the tensors of such calls take "
                f"{storage.size_bytes}, so nothing would be kept for them; make the generator with "
                "a larger kept_bytes"
            )

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
    if processes.is_sharded(target.model):
        return "the target is under FSDP2, whose layers the host gathers"
    return None


def signature_of(parts: Parts, request: Request, captures: bool) -> Signature:
    """Of a call; where steps are captured, rows are filled up to a bucket."""
    rows = len(request.lengths)
    return Signature(
        batch_size=bucket_of_rows(rows) if captures else rows,
        num_draft_tokens=parts.drafter.num_draft_tokens,
        tree_depth=parts.drafter.tree_depth,
        extra_slots=parts.drafter.extra_slots,
        logits_filter=LogitsFilter(rows, **request.logits_filter).signature,
        wants_probs=request.draft_probs and parts.sampler.uses_draft_probs,
        is_captured=captures,
        row_inputs=tuple((n, x.shape[1:], x.dtype) for n, x in request.step_inputs.items()),
        outputs=request.outputs,
    )


def _frozen_values(parts: Parts, captures: bool) -> tuple:
    """What storage has taken over from its parts: data types of weights, settings of drafter and
    sampler; and captured steps besides: addresses of weights. Where one differs, both are made
    again.
    """
    modules = modules_of(parts.drafter)
    drafters = [part for part in modules if isinstance(part, Drafter)]
    settings = [item for part in (*drafters, parts.sampler) for item in vars(part).items()]
    plain = (int, float, str, type(None))
    kept = [(n, v) for n, v in settings if isinstance(v, plain) or is_dataclass(v)]
    models = [value.route for _, value in settings if isinstance(value, SlotModel)]
    weights = [weight for module in modules for weight in parameters_of(module).values()]
    dtypes = sorted(map(str, {weight.dtype for weight in weights if weight is not None}))
    owners = parts.target.model, parts.drafter, parts.sampler
    addresses = weight_addresses(*owners) if captures else ()
    return parts.target.route, *models, *addresses, *dtypes, *map(repr, kept)
