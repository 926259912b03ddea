"""`Runners`: which tensors and graphs a call gets, which are kept for later calls, and why steps
are eager.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Literal

from specdec.drafters.base import check_num_draft_tokens
from specdec.graphs import weight_addresses
from specdec.loop.runner import StepRunner
from specdec.loop.state import Signature, StepState, bucket_of_rows, bucket_of_slots
from specdec.loop.step import Parts
from specdec.request import Request
from specdec.samplers import Warp
from specdec.target import Target


class Runners:
    """The runners of a generator. Those that wait for a call of their signature are kept, the
    latest last; any thread may use them.

    Args:
        target: of the generator.
        graphs: whether steps are captured; as for `SpeculativeGenerator`.
        limit: how many runners are kept; `None` is 4 where steps are captured, else 1.
    """

    def __init__(self, target: Target, *, graphs: bool | Literal["auto"], limit: int | None):
        self._must_capture = graphs is True
        self._device = target.device
        self._reason = None if graphs is True else _why_never(target, graphs)
        self._last_reason: str | None = None
        self._limit = (1 if self._reason else 4) if limit is None else int(limit)
        self._waiting: list[StepRunner] = []
        self._lock = threading.Lock()

    def __getstate__(self) -> dict:
        """Tensors and graphs that are kept for the next call are no part of a pickled generator."""
        return {**vars(self), "_waiting": [], "_lock": None}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[StepRunner]:
        with self._lock:
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
        for runner in self:
            yield from (f"  {line}" for line in runner.describe())

    def take(self, parts: Parts, request: Request, *, is_traced: bool = False) -> StepRunner:
        """A runner for one call, for its caller alone: the latest that waits and fits, else a new
        one. Before a new one is made, one that waits is given up to make room.
        """
        self._last_reason = self.why_eager(request, is_traced=is_traced)
        captures = self._last_reason is None
        signature = _signature(parts, request, captures)
        frozen = _frozen_values(parts) if captures else ()
        with self._lock:
            for runner in reversed(self._waiting):
                is_same = (runner.parts, runner.frozen) == (parts, frozen)
                if is_same and runner.state.signature == signature:
                    self._waiting.remove(runner)
                    runner.resume()
                    return runner
            del self._waiting[: max(0, len(self._waiting) + 1 - self._limit)]
        state = StepState.allocate(signature, parts.target, parts.drafter, parts.sampler, request)
        options = {"captures": captures, "must_capture": self._must_capture, "frozen": frozen}
        return StepRunner(parts, state, **options)

    def give(self, runner: StepRunner) -> None:
        """Keeps a runner, in place of the oldest where there are too many."""
        runner.park()
        with self._lock:
            self._waiting.append(runner)
            del self._waiting[: max(0, len(self._waiting) - self._limit)]

    def clear(self) -> None:
        """Frees all of them."""
        with self._lock:
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


def _signature(parts: Parts, request: Request, captures: bool) -> Signature:
    lengths, room, options = request.prompts.lengths, request.max_new_tokens, request.options
    # It may be set between calls.
    num_draft_tokens = check_num_draft_tokens(parts.drafter.num_draft_tokens)
    num_slots = max(lengths) + room + num_draft_tokens + 1
    return Signature(
        batch_size=bucket_of_rows(len(lengths)) if captures else len(lengths),
        num_draft_tokens=num_draft_tokens,
        num_slots=bucket_of_slots(num_slots, is_coarse=captures),
        warp=Warp(len(lengths), **options.warp).signature,
        wants_probs=options.draft_probs and parts.sampler.uses_draft_probs,
        sampler=type(parts.sampler).__name__,
        dtype=parts.target.dtype,
        is_captured=captures,
    )


def _frozen_values(parts: Parts) -> tuple:
    """What a captured step has taken over from its parts: addresses of weights, and settings of
    drafter and sampler. Where one differs, the step is captured again.
    """
    settings = (*vars(parts.drafter).items(), *vars(parts.sampler).items())
    plain = (int, float, str, type(None))
    kept = [(n, v) for n, v in settings if isinstance(v, plain) or is_dataclass(v)]
    modules = parts.target.model, parts.drafter, parts.sampler
    return *weight_addresses(*modules), *map(repr, kept)
