"""Philox 4x32-10, a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1,
2, 3", SC 2011, section 3.3), in plain integer tensor arithmetic.
"""

from functools import lru_cache

import torch
from torch import Tensor

from specdec.kernels.philox.cpu import KEY_STEPS, MULTIPLIERS, NUM_ROUNDS, uniforms_by_numpy
from specdec.kernels.types import suits_kernels

_MASK = 0xFFFFFFFF


@lru_cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Copied to a device once, since a copy from the host would make every step wait."""
    with torch.inference_mode(False):
        return torch.tensor(MULTIPLIERS, device=device), torch.tensor(KEY_STEPS, device=device)


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Turns counters and keys into random bits, without any state.

    Args:
        counter: `[..., 4]` int64 holding 32-bit words.
        key: `[..., 2]` int64 holding 32-bit words, broadcast against the counter.

    Returns:
        `[..., 4]` int64 holding 32-bit words.

    Example:
        >>> words = philox(torch.zeros(4, dtype=torch.long), torch.zeros(2, dtype=torch.long))
        >>> [f"{word:08x}" for word in words.tolist()]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    if counter.device.type == "cpu":
        from specdec.kernels.philox.words import philox_by_numpy

        return philox_by_numpy(counter, key)
    return philox_of_tensors(counter, key)


def philox_of_tensors(counter: Tensor, key: Tensor) -> Tensor:
    """The definition of `philox`, on any device."""
    multipliers, key_steps = _constants(counter.device)
    even, odd = counter[..., 0::2], counter[..., 1::2]  # words (0, 2) are multiplied, (1, 3) mixed
    for _ in range(NUM_ROUNDS):
        product = even * multipliers  # wraps modulo 2**64; the bits are those of the unsigned one
        high, low = (product >> 32) & _MASK, product & _MASK
        even, odd = high.flip(-1) ^ odd ^ key, low.flip(-1)
        key = (key + key_steps) & _MASK
    return torch.stack([even, odd], dim=-1).flatten(-2)


def to_uniforms(high: Tensor, low: Tensor) -> Tensor:
    """float64 in [0, 1) from two words each: 52 bits, so that `u * total < total` holds after
    rounding for any total.
    """
    return ((high << 20) | (low >> 12)).double() * 2.0**-52


def step_uniforms(key: Tensor, position: Tensor, num_streams: int, width: int) -> Tensor:
    """The uniforms of a step, `[B, num_streams, width]` float64 in [0, 1). The counter of each is
    (position, index, stream, 0).

    Args:
        key: `[B, 2]` int64, the two 32-bit words of each row's seed.
        position: `[B]` int64, of the step's root.
        num_streams: streams of independent numbers.
        width: numbers per stream.

    Example:
        >>> key, position = torch.tensor([[7, 0]]), torch.tensor([3])
        >>> wide, narrow = (step_uniforms(key, position, 2, width) for width in (5, 2))
        >>> wide.shape, wide[..., :2].equal(narrow)
        (torch.Size([1, 2, 5]), True)
    """
    if position.is_cuda and suits_kernels(position):
        from specdec.kernels.philox import triton

        return triton.step_uniforms(key, position, num_streams, width)
    if position.device.type == "cpu":
        return uniforms_by_numpy(key, position, num_streams, width)
    return uniforms_of_tensors(key, position, num_streams, width)


def uniforms_of_tensors(key: Tensor, position: Tensor, num_streams: int, width: int) -> Tensor:
    """The definition of `step_uniforms`, on any device."""
    rows, device = len(position), position.device
    counter = torch.zeros(rows, num_streams, width, 4, dtype=torch.long, device=device)
    counter[..., 0] = position[:, None, None]
    counter[..., 1] = torch.arange(width, device=device)
    counter[..., 2] = torch.arange(num_streams, device=device)[:, None]
    words = philox(counter, key[:, None, None])
    return to_uniforms(words[..., 0], words[..., 1])


def named_uniforms(key: Tensor, position: Tensor, name: int, num: int) -> Tensor:
    """`[B, num]` float64 in [0, 1) of a name. The counter of each is (position, index, name, 1), so
    no number of the streams is among them.

    Args:
        key, position: as of `step_uniforms`.
        name: a 32-bit word.
        num: of each row.
    """
    counter = torch.ones(len(position), num, 4, dtype=torch.long, device=position.device)
    counter[..., 0] = position[:, None]
    counter[..., 1] = torch.arange(num, device=position.device)
    counter[..., 2] = name
    words = philox(counter, key[:, None])
    return to_uniforms(words[..., 0], words[..., 1])
