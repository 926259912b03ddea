"""Philox on a CPU, by NumPy: one operation to torch's dispatcher in place of 104, which takes a
third of their time over the few counters of a step.
"""

import numpy as np
import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
_MASK, _WORD = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIERS = np.array(MULTIPLIERS, dtype=np.uint64)
_KEY_STEPS = np.outer(np.arange(NUM_ROUNDS, dtype=np.uint64), np.array(KEY_STEPS, dtype=np.uint64))


# One operation to the dispatcher, so that `no_host_sync` on a CPU checks the step that a GPU would
# run: NumPy reads the memory of its arguments.
@torch.library.custom_op("specdec::philox", mutates_args=(), device_types="cpu")
def philox_by_numpy(counter: Tensor, key: Tensor) -> Tensor:
    """As `reference.philox_of_tensors`."""
    words, seeds = counter.numpy().view(np.uint64), key.numpy().view(np.uint64)
    even, odd = words[..., 0::2], words[..., 1::2]
    for step in _KEY_STEPS:
        product = (even * _MULTIPLIERS)[..., ::-1]
        even = (product >> _WORD) ^ odd ^ ((seeds + step) & _MASK)
        odd = product & _MASK
    mixed = np.stack([even, odd], axis=-1)
    return torch.from_numpy(mixed.view(np.int64).reshape(*mixed.shape[:-2], 4))


@philox_by_numpy.register_fake
def _(counter: Tensor, key: Tensor) -> Tensor:
    return counter.new_empty(*torch.broadcast_shapes(counter.shape[:-1], key.shape[:-1]), 4)
