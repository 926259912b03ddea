"""`CapturedStorage`: a storage whose steps and prompt chunks are replayed as graphs."""

from __future__ import annotations

from collections.abc import Container

from specdec.loop.replay import Replay
from specdec.loop.state import Parts, Signature, StepState
from specdec.loop.storage import Storage
from specdec.request.call import Request


class CapturedStorage(Storage):
    """The tensors of one call after the other, and the graphs that were captured over them.

    Args:
        parts, state, serves, size_bytes: as of `Storage`.
        must_capture: a step that cannot be captured raises an error.
        is_first: nothing of the model was captured before.
    """

    replay: Replay

    def __init__(
        self,
        parts: Parts,
        state: StepState,
        serves: tuple,
        size_bytes: int,
        *,
        must_capture: bool,
        is_first: bool,
    ):
        super().__init__(parts, state, serves, size_bytes)
        options = {"must_capture": must_capture, "is_first": is_first}
        self.stepper = self.replay = Replay(parts, state, **options)

    @property
    def fixed_chunks(self) -> Container[int]:
        """Sizes of the chunks that are captured."""
        return self.replay.captured_chunks

    def load(self, request: Request, signature: Signature) -> None:
        """As `Storage`'s, with the state that is replayed."""
        super().load(request, signature)
        self.replay.state = self.state

    def chunks(self, length: int, chunk_size: int) -> list[int]:
        """Sizes of the chunks that so many tokens are read in, of those that are captured."""
        return self.replay.chunks(length, chunk_size)

    def run_chunk(self, size: int) -> None:
        """Reads a chunk of so many tokens of the prompts that were loaded, by its graph."""
        self.replay.run_chunk(size)
