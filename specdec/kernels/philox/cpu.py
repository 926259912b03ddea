"""The uniforms of a step on a CPU, by NumPy: one operation to torch's dispatcher in place of 120,
in a third of their time.
"""

import numpy as np
import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
_MASK, _WORD = np.uint64(0xFFFFFFFF), np.uint64(32)
_KEPT_HIGH, _DROPPED_LOW = np.uint64(20), np.uint64(12)
_MULTIPLIERS = np.array(MULTIPLIERS, dtype=np.uint64)
_KEY_STEPS = np.outer(np.arange(NUM_ROUNDS, dtype=np.uint64), np.array(KEY_STEPS, dtype=np.uint64))


# One operation to the dispatcher, so that `no_host_sync` on a CPU checks the step that a GPU would
# run: NumPy reads the memory of its arguments.
@torch.library.custom_op("specdec::step_uniforms", mutates_args=(), device_types="cpu")
def uniforms_by_numpy(key: Tensor, position: Tensor, num_streams: int, width: int) -> Tensor:
    """As `reference.uniforms_of_tensors`."""
    rows, count = len(position), num_streams * width
    even, odd = np.zeros((2, 2, rows, num_streams, width), dtype=np.uint64)
    even[0] = position.numpy()[:, None, None]
    odd[0] = np.arange(width)
    even[1] = np.arange(num_streams)[:, None]
    seeds = key.numpy().view(np.uint64).T.repeat(count, axis=1)  # [2, rows * count]
    even, odd = mixed(even.reshape(2, -1), odd.reshape(2, -1), seeds)
    bits = (even[0] << _KEPT_HIGH) | (odd[0] >> _DROPPED_LOW)
    uniforms = bits * 2.0**-52  # of 52 bits, which float64 holds exactly
    return torch.from_numpy(uniforms.reshape(rows, num_streams, width))


@uniforms_by_numpy.register_fake
def _(key: Tensor, position: Tensor, num_streams: int, width: int) -> Tensor:
    return key.new_empty(len(position), num_streams, width, dtype=torch.float64)


def mixed(even: np.ndarray, odd: np.ndarray, seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The words (0, 2) and (1, 3) of counters `[2, ...]` after all rounds with seeds `[2, ...]`."""
    trailing = [1] * (even.ndim - 1)
    multipliers = _MULTIPLIERS.reshape(2, *trailing)
    for key in (seeds + _KEY_STEPS.reshape(NUM_ROUNDS, 2, *trailing)) & _MASK:
        product = even * multipliers
        even = (product >> _WORD)[::-1] ^ odd ^ key
        odd = (product & _MASK)[::-1]
    return even, odd
