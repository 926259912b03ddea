"""Randomness as an argument: counter-based uniforms that depend on a row's own seed and position
only.

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3)
turns a counter and a key into 128 random bits without any state. Here the key is the row's seed and
the counter is (position of the step's anchor, index within the step, stream, 0). Consequences:

- A row's draws do not depend on its neighbours, the batch order, the padding or the device.
- Streams (propose, accept, resample) are different counters, so no draw is ever used for two
  purposes.
- Every step starts at a new position, so no draw is ever used in two steps. (Keying by the position
  of each *token* would reuse the noise of rejected tokens in the next step; a sampler whose
  decision at one position looks at later ones would then be biased.)
"""

from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10

MAX_SEED = 2**64 - 1


class Stream(IntEnum):
    """What a draw is for; part of the counter, so that streams are disjoint."""

    PROPOSE = 0
    ACCEPT = 1
    RESAMPLE = 2


@lru_cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Copied to a device once, since a copy from the host would make every step wait."""
    with torch.inference_mode(False):
        return torch.tensor(_MULTIPLIERS, device=device), torch.tensor(_KEY_STEPS, device=device)


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Philox 4x32-10 in integer tensor arithmetic.

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
    multipliers, key_steps = _constants(counter.device)
    even, odd = (
        counter[..., 0::2],
        counter[..., 1::2],
    )  # words (0, 2) are multiplied, (1, 3) mixed in
    for _ in range(_ROUNDS):
        product = (
            even * multipliers
        )  # wraps modulo 2**64; the bits are those of the unsigned product
        high, low = (product >> 32) & _MASK, product & _MASK
        even, odd = high.flip(-1) ^ odd ^ key, low.flip(-1)
        key = (key + key_steps) & _MASK
    return torch.stack([even, odd], dim=-1).flatten(-2)


class StepNoise:
    """All draws of one step.

    Args:
        uniforms: `[B, streams, W]` float64 in [0, 1), W draws per stream.
    """

    def __init__(self, uniforms: Tensor):
        self._streams = uniforms.unbind(dim=1)

    def uniform(self, stream: Stream) -> Tensor:
        """`[B, W]` float64 uniforms of one stream.

        Args:
            stream: what they are for.
        """
        return self._streams[stream]

    def column(self, stream: Stream, index: int) -> Tensor:
        """`[B, 1]`: one draw per row of one stream.

        Args:
            stream: what it is for.
            index: which of the W.
        """
        return self._streams[stream].narrow(1, index, 1)


class Noise:
    """Per-row source of uniforms; holds seeds, no state.

    Args:
        seeds: one integer in 0..2**64 - 1 per row.
        device: where draws are made; the bits are the same everywhere.

    Raises:
        ValueError: a seed is out of range.

    Example:
        >>> noise = Noise([7, 7])
        >>> step = noise.at(torch.tensor([3, 3]), width=5)
        >>> u = step.uniform(Stream.ACCEPT)
        >>> u.shape, bool((u[0] == u[1]).all())
        (torch.Size([2, 5]), True)
    """

    def __init__(self, seeds: list[int], *, device: torch.device | str = "cpu"):
        for row, seed in enumerate(seeds):
            if not 0 <= seed <= MAX_SEED:
                raise ValueError(
                    f"seed of row {row} is {seed}; expected an integer in 0..2**64 - 1"
                )
        self._key = torch.tensor([[seed & _MASK, seed >> 32] for seed in seeds], device=device)[
            :, None
        ]
        self._streams = torch.arange(len(Stream), device=device)

    def at(self, start: Tensor, width: int) -> StepNoise:
        """The draws of the step whose anchor is at position `start`.

        Args:
            start: `[B]` int64.
            width: draws per stream, K + 1 for a chain.

        Returns:
            Uniforms for every stream, made in one pass.
        """
        rows, streams = len(start), len(Stream)
        index = torch.arange(width, device=start.device)
        counter = torch.zeros(rows, streams, width, 4, dtype=torch.long, device=start.device)
        counter[..., 0] = start[:, None, None]
        counter[..., 1] = index
        counter[..., 2] = self._streams[:, None]
        words = philox(counter.flatten(1, 2), self._key)  # [B, streams * width, 4]
        # 52 bits: exact in float64, and u * total < total holds after rounding, for any total.
        uniforms = ((words[..., 0] << 20) | (words[..., 1] >> 12)).double() * 2.0**-52
        return StepNoise(uniforms.view(rows, streams, width))


class ZeroNoise:
    """Noise whose every draw is 0: all that is needed where every law is one-hot (temperature 0).

    Args:
        batch_size: rows B.
        width: draws per stream, K + 1 for a chain.
        device: where the draws live.
    """

    def __init__(self, batch_size: int, width: int, *, device: torch.device | str = "cpu"):
        shape = batch_size, len(Stream), width
        self._step = StepNoise(torch.zeros(shape, dtype=torch.float64, device=device))

    def at(self, start: Tensor, width: int) -> StepNoise:
        """The same zeros at every position."""
        return self._step
