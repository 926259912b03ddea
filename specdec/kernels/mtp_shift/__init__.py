"""The window over which a multi-token prediction head repairs its keys and values. See README.md."""

from specdec.kernels.mtp_shift.reference import PastRows, ShiftedWindow, mtp_shift

__all__ = ["PastRows", "ShiftedWindow", "mtp_shift"]
