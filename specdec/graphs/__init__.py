"""Functions over tensors as CUDA graphs, and tools for what is to become one; see README.md."""

from specdec.graphs.capture import Captured, CaptureError, GraphPool
from specdec.graphs.storage import StorageMovedError, stable_storage
from specdec.graphs.sync import HostSyncError, no_host_sync
from specdec.graphs.tree import shared, weight_addresses

__all__ = [
    "CaptureError",
    "Captured",
    "GraphPool",
    "HostSyncError",
    "StorageMovedError",
    "no_host_sync",
    "shared",
    "stable_storage",
    "weight_addresses",
]
