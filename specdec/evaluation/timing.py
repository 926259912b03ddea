"""Wall-clock time of work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def timed(run: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What a call returns, and the seconds until the device had done it.

    Args:
        run: the call.
        device: waited for before the call and after it.

    Example:
        >>> timed(lambda: 3, torch.device("cpu"))[0]
        3
    """
    synchronize(device)
    started = time.perf_counter()
    result = run()
    synchronize(device)
    return result, time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Waits for a device; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
