"""`Interruption`: Ctrl-C and termination wait for the end of a step, so that it can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Takes note of the first signal, and lets the second one interrupt at once.

    Outside of the main thread Python delivers no signals, and nothing is changed.

    Example:
        >>> with Interruption().listening() as interruption:
        ...     signal.raise_signal(signal.SIGINT)
        ...     interruption.is_requested
        True
    """

    def __init__(self):
        self.is_requested = False
        self._is_immediate = False

    @contextmanager
    def listening(self) -> Iterator[Interruption]:
        """Handles the signals for a while; afterwards they do what they did before."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        found = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in found.items():
                signal.signal(number, handler)

    def run(self, work: Callable[[], Any]) -> Any:
        """What `work` returns; `None` if a signal came before its end. It may break off anywhere,
        so the first signal ends it.
        """
        if self.is_requested:
            return None
        self._is_immediate = True
        try:
            return work()
        except KeyboardInterrupt:
            self.is_requested = True
            return None
        finally:
            self._is_immediate = False

    def is_agreed(self, accelerator: Accelerator) -> bool:
        """Whether any process was asked to stop."""
        if accelerator.num_processes == 1:
            return self.is_requested
        flag = torch.tensor(float(self.is_requested), device=accelerator.device)
        return accelerator.reduce(flag, reduction="sum").item() > 0

    def _on_signal(self, number: int, frame: object) -> None:
        is_second, self.is_requested = self.is_requested, True
        if self._is_immediate or is_second:
            raise KeyboardInterrupt
