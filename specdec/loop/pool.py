"""`RunnerPool`: the storage and graphs that a generator keeps for later calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Literal

import torch

from specdec.drafters.base import Drafter
from specdec.graphs import weight_addresses
from specdec.graphs.tree import modules_of
from specdec.loop.runner import NUM_EAGER, StepRunner
from specdec.loop.state import Parts, Signature, StepState, bucket_of_rows
from specdec.request import Request
from specdec.samplers import Warp
from specdec.target import Target
from specdec.target.cache import memory_bytes
from specdec.target.target import SlotModel

FIRST_TOKENS = 2048
"""Tokens of all rows together that captured storage has room for at least."""
STORAGE_MULTIPLE = 64
"""Numbers of slots are multiples of this."""


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
        of_any_options = signature._replace(warp=(), wants_probs=False, wants_logprobs=False)
        serves = parts, of_any_options, _frozen_values(parts, captures)
        length = max(request.lengths) + request.max_new_tokens
        num_slots = length + signature.num_behind
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

    def check_kept(self, runner: StepRunner) -> None:
        """Raises `ValueError` for a runner that will not be kept for another call."""
        if runner.size_bytes > self._kept_bytes:
            raise ValueError(
                f"kept_bytes is {self._kept_bytes}, and the tensors of such calls take "
                f"{runner.size_bytes}, so nothing would be kept for them; make the generator with "
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
    return None


def signature_of(parts: Parts, request: Request, captures: bool) -> Signature:
    """Of a call; where steps are captured, rows are filled up to a bucket."""
    rows = len(request.lengths)
    return Signature(
        batch_size=bucket_of_rows(rows) if captures else rows,
        num_draft_tokens=parts.drafter.num_draft_tokens,
        tree_depth=parts.drafter.tree_depth,
        extra_slots=parts.drafter.extra_slots,
        warp=Warp(rows, **request.warp).signature,
        wants_probs=request.draft_probs and parts.sampler.uses_draft_probs,
        is_captured=captures,
        row_inputs=tuple((n, x.shape[1:], x.dtype) for n, x in request.row_inputs.items()),
        wants_logprobs=request.output_logprobs,
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
    weights = [weight for module in modules for weight in module._parameters.values()]
    dtypes = sorted(map(str, {weight.dtype for weight in weights if weight is not None}))
    owners = parts.target.model, parts.drafter, parts.sampler
    addresses = weight_addresses(*owners) if captures else ()
    return parts.target.route, *models, *addresses, *dtypes, *map(repr, kept)
