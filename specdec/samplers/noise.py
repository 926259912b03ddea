"""Randomness as an argument: counter-based uniforms that depend on a row's own seed and position
only.

Philox turns a counter and a key into 128 random bits without any state. Here the key is the row's
seed and the counter is (position of the step's anchor, index within the step, stream, 0).
Consequences:

- A row's draws do not depend on its neighbours, the batch order, the padding or the device.
- Streams (propose, accept, resample) are different counters, so no draw is ever used for two
  purposes.
- Every step starts at a new position, so no draw is ever used in two steps. (Keying by the position
  of each *token* would reuse the noise of rejected tokens in the next step; a sampler whose
  decision at one position looks at later ones would then be biased.)
"""

from __future__ import annotations

import copy
from enum import IntEnum
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from specdec.kernels import philox, race
from specdec.kernels.philox import to_uniforms
from specdec.types import keep_rows

if TYPE_CHECKING:
    from specdec.samplers.warp import Warp

MAX_SEED = 2**64 - 1
_RACE_STREAM = 3  # of coupled noise, which has no other


class Stream(IntEnum):
    """What a draw is for; part of the counter, so that streams are disjoint."""

    PROPOSE = 0
    ACCEPT = 1
    RESAMPLE = 2


class StepNoise:
    """All draws of one step.

    Args:
        uniforms: `[B, streams, W]` float64 in [0, 1), W draws per stream.
    """

    tells_laws = True
    """`propose` tells the laws of its tokens, where they are not point masses."""

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

    def without_laws(self) -> Self:
        """The same draws, and no laws told of them: they look like point masses."""
        other = copy.copy(self)
        other.tells_laws = False
        return other

    def propose(
        self, logits: Tensor, warp: Warp, index: int, into: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Draws the draft token of one place.

        Args:
            logits: `[B, 1, V]` of the drafter, over the target's vocabulary.
            warp: from logits to the law that the token is drawn from.
            index: the place, 0..K - 1.
            into: a table that is filled with the law, if one is told; see `kernels.sample`.

        Returns:
            Tokens `[B, 1]`, and the law `[B, 1, V]`; `None` for a point mass.
        """
        uniforms = None if warp.is_greedy else self.column(Stream.PROPOSE, index)
        if not self.tells_laws:
            return warp.choose(logits, uniforms), None
        return warp.draw(logits, uniforms, into)


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
        words = [[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds]
        self._key = torch.tensor(words, device=device)  # [B, 2]
        self._position = torch.tensor([1, 0, 0, 0], device=device)
        self._counters: dict[int, Tensor] = {}  # of position 0, by width

    def keep(self, rows: list[int]) -> Self:
        """The noise of the given rows, in the storage of this one, which must not be used any more;
        see `keep_rows`.
        """
        kept = copy.copy(self)
        kept._key = keep_rows(self._key, rows)
        return kept

    def at(self, start: Tensor, width: int) -> StepNoise:
        """The draws of the step whose anchor is at position `start`.

        Args:
            start: `[B]` int64.
            width: draws per stream, K + 1 for a chain.

        Returns:
            Uniforms for every stream, made in one pass.
        """
        if width not in self._counters:
            self._counters[width] = _counters_at_0(width, start.device)
        counter = self._counters[width] + start[:, None, None] * self._position
        words = philox(counter, self._key[:, None])  # [B, streams * width, 4]
        uniforms = to_uniforms(words[..., 0], words[..., 1])
        return StepNoise(uniforms.view(len(start), len(Stream), width))


def _counters_at_0(width: int, device: torch.device) -> Tensor:
    """`[streams * width, 4]`: (position, index, stream, 0) at position 0, stream by stream."""
    with torch.inference_mode(False):  # these outlive the mode that they were first needed in
        stream = torch.arange(len(Stream), device=device)[:, None].expand(-1, width)
        index = torch.arange(width, device=device).expand_as(stream)
        words = torch.zeros_like(index), index, stream, torch.zeros_like(index)
        return torch.stack(words, dim=-1).flatten(0, 1)


class ZeroNoise:
    """Noise whose every draw is 0: all that is needed where every law is one-hot (temperature 0).

    Args:
        batch_size: rows B.
        width: draws per stream, K + 1 for a chain.
        device: where the draws live.
    """

    def __init__(self, batch_size: int, width: int, *, device: torch.device | str = "cpu"):
        shape = batch_size, len(Stream), width
        self._zeros = torch.zeros(shape, dtype=torch.float64, device=device)
        self._step = StepNoise(self._zeros)

    def keep(self, rows: list[int]) -> ZeroNoise:
        """As many zeros as there are rows."""
        kept = copy.copy(self)
        kept._step = StepNoise(self._zeros[: len(rows)])
        return kept

    def at(self, start: Tensor, width: int) -> StepNoise:
        """The same zeros at every position."""
        return self._step


class CoupledStepNoise(StepNoise):
    """Draws of a step in which drafter and target race with the same noise at each position.

    Args:
        key: `[B, 2]` words of the rows' seeds.
        start: `[B]` position of the anchor.
    """

    tells_laws = False

    def __init__(self, key: Tensor, start: Tensor):
        self._key = key
        self._start = start

    def uniform(self, stream: Stream) -> Tensor:
        """There are none, and nothing may use them."""
        raise TypeError(
            "coupled noise has no uniforms to accept or resample with; use it with CouplingSampler"
        )

    def column(self, stream: Stream, index: int) -> Tensor:
        """As `uniform`."""
        return self.uniform(stream)

    def propose(
        self, logits: Tensor, warp: Warp, index: int, into: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """As `StepNoise.propose`, by the race at the draft token's position. The token is told to
        nobody as a draw from a law, since the target will not draw independently of it.
        """
        return self.race(logits, warp, index), None

    def race(self, logits: Tensor, warp: Warp, index: int = 0) -> Tensor:
        """Tokens `[B, N]` of the places from `index` on, given logits `[B, N, V]`."""
        if warp.is_greedy:
            return logits.argmax(dim=-1)
        places = torch.arange(1 + index, 1 + index + logits.shape[1], device=logits.device)
        return race(
            logits, warp.params(logits), self._key, self._start[:, None] + places, _RACE_STREAM
        )


class CoupledNoise(Noise):
    """Noise that belongs to positions of the text, not to steps: what `CouplingSampler` needs.

    Args and Raises: as `Noise`.
    """

    def at(self, start: Tensor, width: int) -> CoupledStepNoise:
        """The draws at the positions behind `start`."""
        return CoupledStepNoise(self._key, start)
