"""The window that repairs the depths of a multi-token prediction head. See README.md."""

from functools import wraps

from specdec.kernels.choice import suits_kernels
from specdec.kernels.mtp_shift import reference
from specdec.kernels.mtp_shift.reference import PastRows, ShiftedWindow
from specdec.types import Context


@wraps(reference.shift_window)
def shift_window(
    context: Context, past: PastRows, width: int, *, trash: int, num_later: int = 0
) -> ShiftedWindow:
    """`reference.shift_window`, or its Triton kernels on a GPU."""
    new = context.features
    if new is None or not (new.is_cuda and suits_kernels(new)):
        return reference.shift_window(context, past, width, trash=trash, num_later=num_later)
    from specdec.kernels.mtp_shift import triton

    return triton.shift_window(context, past, width, trash=trash, num_later=num_later)
