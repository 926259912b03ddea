"""The window that repairs the depths of a multi-token prediction head. See README.md."""

from specdec.kernels.mtp_shift.reference import PastRows, ShiftedWindow, mtp_shift

__all__ = ["PastRows", "ShiftedWindow", "mtp_shift"]
