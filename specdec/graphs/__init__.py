"""Tools for steps that run as one graph."""

from specdec.graphs.sync import HostSyncError, no_host_sync

__all__ = ["HostSyncError", "no_host_sync"]
