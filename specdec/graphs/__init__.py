"""Functions over tensors as CUDA graphs, and tools for what is to become one; see README.md."""

from specdec.graphs.capture import Captured
from specdec.graphs.sync import no_host_sync
from specdec.graphs.tree import shared

__all__ = ["Captured", "no_host_sync", "shared"]
