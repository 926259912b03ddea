"""How programs wait for others: those of the launch before, and those of their own.

The launches of one operation overlap: the second starts while the first ends, and reads what does
not depend on it meanwhile.

Within a launch a program waits only for programs of lower ids. GPUs start programs in the order of
their ids (CUDA does not promise it; NVIDIA's own scan, CUB's DeviceScan, relies on it too), so
those are done or running, and no wait is for ever, however few run at a time. Triton's interpreter
runs one after the other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def overlap(tensor: Tensor) -> dict[str, bool]:
    """Options of a launch that may start while the one before it ends, where the tensor's device
    can do this.
    """
    if tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (9, 0):
        return {"is_early": True, "launch_pdl": True}
    return {"is_early": False}


@triton.jit
def let_next_start(is_early: tl.constexpr):
    """The next launch may start when all programs are here."""
    if is_early:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(is_early: tl.constexpr):
    """Behind this the launch before has ended."""
    if is_early:
        tl.extra.cuda.gdc_wait()


@triton.jit
def announce(counter):
    """Tells the others that what this program wrote can be read; returns how many told so before,
    whose writes can be read from here on.
    """
    tl.debug_barrier()  # every thread wrote
    return tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def wait(counter, count):
    """Waits until `count` programs have announced."""
    while tl.atomic_add(counter, 0, sem="acquire") < count:
        pass
