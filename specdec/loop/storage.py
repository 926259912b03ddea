"""`Storage`: the tensors of a generator's calls, one after the other.

Steps and chunks of prompts run eagerly here; `loop/captured_storage.py` replays them.
"""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import TYPE_CHECKING

import torch

from specdec.loop.prefill import chunks, prefill, prefill_chunk
from specdec.loop.state import Parts, Signature, StepState
from specdec.loop.step import Stepper, step
from specdec.request.call import Request
from specdec.samplers import LogitsFilter

if TYPE_CHECKING:
    from specdec.loop.replay import Replay


class Storage:
    """The tensors of one call after the other.

    Args:
        parts, state: of the calls; the state's tensors stay where they are.
        serves: what calls must share to run here, see `StoragePool`.
        size_bytes: of the state. What graphs take besides, a few per cent, differs between the
            processes of one target, which have to keep the same.

    Attributes:
        stepper: takes the steps of the loaded call.
        replay: of the state, where steps are captured; `None` where all are eager.
        fixed_chunks: sizes of chunks that attend over all slots, unless they are the first.
    """

    replay: Replay | None = None
    fixed_chunks: Container[int] = ()

    def __init__(self, parts: Parts, state: StepState, serves: tuple, size_bytes: int):
        self.parts, self.state, self.serves = parts, state, serves
        self.stepper: Stepper = partial(step, parts)
        self.size_bytes = size_bytes
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
        self.state.load(request)

    def prefill(self, request: Request, chunk_size: int) -> None:
        """Reads the prompts of the call that was loaded, in chunks of at most so many tokens."""
        if request.prompt_inputs is not None:
            from specdec.loop.prefill_inputs import prefill_inputs

            return prefill_inputs(self.parts, self.state, request, chunk_size)
        sizes = self.chunk_sizes(request, chunk_size)
        prefill(self.state, sizes, self.run_chunk, fixed=self.fixed_chunks)

    def chunk_sizes(self, request: Request, chunk_size: int) -> list[int]:
        """Sizes of the chunks that the prompts of a call are read in."""
        if request.prompt_inputs is not None:
            return request.prompt_inputs.chunk_sizes(chunk_size)
        return self.chunks(max(request.lengths) - 1, chunk_size)

    def chunks(self, length: int, chunk_size: int) -> list[int]:
        """Sizes of the chunks that so many tokens are read in."""
        return chunks(length, chunk_size)

    def run_chunk(self, size: int) -> None:
        """Reads a chunk of so many tokens of the prompts that were loaded."""
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
