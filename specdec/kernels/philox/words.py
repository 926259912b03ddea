"""Philox on a CPU, by NumPy, for races and for numbers by a name: one operation to torch's
dispatcher in place of 104, as in `cpu.py`.
"""

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.philox.cpu import mixed


@torch.library.custom_op("specdec::philox", mutates_args=(), device_types="cpu")
def philox_by_numpy(counter: Tensor, key: Tensor) -> Tensor:
    """As `reference.philox_of_tensors`."""
    words, seeds = (
        np.ascontiguousarray(np.moveaxis(table.numpy().view(np.uint64), -1, 0))
        for table in (counter, key)
    )
    out = np.stack(mixed(words[0::2], words[1::2], seeds), axis=1)  # [2, 2, ...]
    out = np.moveaxis(out.reshape(4, *out.shape[2:]), 0, -1)
    return torch.from_numpy(np.ascontiguousarray(out).view(np.int64))


@philox_by_numpy.register_fake
def _(counter: Tensor, key: Tensor) -> Tensor:
    return counter.new_empty(*torch.broadcast_shapes(counter.shape[:-1], key.shape[:-1]), 4)
