"""`StoragePool`: the storages of a generator that wait for a call."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Literal

from specdec.drafters.base import Drafter
from specdec.graphs.tree import modules_of, weight_addresses
from specdec.loop.state import Parts, Signature, bucket_of_rows
from specdec.loop.storage import Storage
from specdec.request.call import Request
from specdec.samplers import LogitsFilter
from specdec.targets import Target
from specdec.targets.slot_model import SlotModel
from specdec.torch_names import parameters_of


class StoragePool:
    """The storages of a generator that wait for a call, the latest last, as many as fit into a
    number of bytes; any thread may use them.

    A storage serves a call of the same parts, batch size, K and settings of the parts, whatever its
    options are, if it has the slots.

    Args:
        target: of the generator.
        graphs: whether steps are captured; as for `SpeculativeGenerator`.
        kept_bytes: that waiting storages may hold; `None` is a quarter of the device's memory.

    Attributes:
        reason: why no step is captured; `None` where steps are.
        last_reason: why those of the last call were not.
    """

    def __init__(self, target: Target, *, graphs: bool | Literal["auto"], kept_bytes: int | None):
        from specdec.loop.capturing import most_kept, why_never

        self.must_capture, self.device = graphs is True, target.device
        self.reason = None if graphs is True else why_never(target, graphs)
        self.last_reason: str | None = None
        self.kept_bytes = most_kept(target.device) if kept_bytes is None else kept_bytes
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
        if self.reason is not None:
            return self.reason
        from specdec.loop.capturing import why_not_this_call

        return why_not_this_call(request, is_traced=is_traced)

    def take(self, parts: Parts, request: Request, *, why_eager: str | None) -> Storage:
        """A storage for one call, for its caller alone, with the call loaded: the latest that waits
        and has room for it, else a new one.
        """
        self.last_reason, captures = why_eager, why_eager is None
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
            from specdec.loop.new_storage import new_storage

            largest = max((s.num_slots for s in alike), default=0)
            del alike
            storage = new_storage(
                *(parts, request, signature, serves),
                needed=num_slots,
                largest=largest,
                must_capture=self.must_capture,
                is_first=not has_graphs,
                clear=self.clear,
            )
        storage.resume()
        storage.load(request, signature)
        return storage

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
        while self._waiting and sum(s.size_bytes for s in self._waiting) > self.kept_bytes:
            del self._waiting[0]

    def clear(self) -> None:
        """Frees all of them."""
        with self._lock:
            self._collect()
            self._waiting.clear()


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
    # Themselves, since another function may come to stand at the address that a text shows.
    records = [value for _, value in kept if is_dataclass(value)]
    held = [getattr(record, f.name, None) for record in records for f in fields(record)]
    functions = [value for value in (*(v for _, v in settings), *held) if callable(value)]
    return parts.target.route, *models, *addresses, *dtypes, *map(repr, kept), *functions
