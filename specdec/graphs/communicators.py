"""Graphs that hold collectives are freed before the communicators of these collectives.

NCCL ends a communicator only after every graph that captured one of its operations is freed. With
such a graph alive `torch.distributed.destroy_process_group()` never returns (pytorch#115388).
"""

from __future__ import annotations

import atexit
from typing import Protocol
from weakref import WeakSet

from torch.distributed import distributed_c10d


class Captured(Protocol):
    """What holds a graph."""

    def release(self) -> None:
        """Frees it."""


def release_before_communicators(captured: Captured) -> None:
    """Has a captured function released when its process groups are destroyed, or at exit.

    Without a process group this does nothing. `destroy_process_group()` first calls `finalize()` of
    every member of `_world.comms`, whatever name it was imported by; torch offers no public hook.
    The destruction of one group (`destroy_process_group(group)`) makes no such call.

    Args:
        captured: is held weakly.
    """
    if not distributed_c10d.is_initialized():
        return
    members = distributed_c10d._world.comms
    for member in members:
        if isinstance(member, _LiveGraphs):
            break
    else:
        members.append(member := _LiveGraphs())
    member.captured.add(captured)


class _LiveGraphs:
    """What was captured while the process groups of now existed."""

    def __init__(self):
        self.captured: WeakSet[Captured] = WeakSet()
        atexit.register(self.finalize)

    def finalize(self) -> None:
        """Called by torch before it ends the communicators, and by Python at exit."""
        for captured in list(self.captured):
            captured.release()
