"""Functions over tensors as CUDA graphs, and tools for what is to become one; see README.md."""

from importlib import import_module
from typing import TYPE_CHECKING

from specdec.graphs.tree import shared

if TYPE_CHECKING:
    from specdec.graphs.capture import Captured
    from specdec.graphs.sync import no_host_sync

_HOMES = {"specdec.graphs.capture": "Captured", "specdec.graphs.sync": "no_host_sync"}
"""Modules of names that are imported on their first use: states need none of them."""

__all__ = ["Captured", "no_host_sync", "shared"]


def __getattr__(name: str):
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
