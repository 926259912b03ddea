"""Races between tokens, by the numbers of the position that a token is drawn for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from specdec.kernels import race
from specdec.kernels.race.reference import exponentials, first_arrival

if TYPE_CHECKING:
    from specdec.samplers.logits_filter import LogitsFilter

_RACE_STREAM, _EXTRA_STREAM, _PATH_STREAM = 3, 4, 256
"""In counters, after the streams of `samplers.noise.Stream`."""


class Races(NamedTuple):
    """The races of a step.

    Args:
        key, start: as of `StepNoise`.
        depths: as of `StepNoise.at_depths`; `None` in a chain.
    """

    key: Tensor
    start: Tensor
    depths: Tensor | int | None

    def race(
        self, logits: Tensor, logits_filter: LogitsFilter, index: int, path: Tensor | int
    ) -> Tensor:
        """As `StepNoise.race`."""
        if isinstance(path, Tensor):
            return first_arrival(logits_filter(logits), self.arrivals(logits, index, path))
        stream = _PATH_STREAM + path if path else _RACE_STREAM
        positions = self._positions(logits, index)
        return race(logits, logits_filter.params(logits), self.key, positions, stream)

    def arrivals(self, logits: Tensor, index: int, path: Tensor | int) -> Tensor:
        """As `StepNoise.arrivals`."""
        if isinstance(path, Tensor):
            stream = torch.where(path > 0, _PATH_STREAM + path, _RACE_STREAM)
        else:
            stream = _PATH_STREAM + path if path else _RACE_STREAM
        positions = self._positions(logits, index)
        return exponentials(self.key, positions, stream, logits.shape[2])

    def exponentials(self, vocab_size: int) -> Tensor:
        """As `StepNoise.exponentials`."""
        return exponentials(self.key, self.start[:, None], _EXTRA_STREAM, vocab_size)[:, 0]

    def _positions(self, logits: Tensor, index: int) -> Tensor:
        """`[B, N]` of the tokens that logits `[B, N, V]` are of."""
        offsets = self.depths
        if offsets is None:
            offsets = torch.arange(index, index + logits.shape[1], device=logits.device)
        return (self.start[:, None] + 1 + offsets).expand(logits.shape[:2])


def draw_by_race(
    logits: Tensor,
    logits_filter: LogitsFilter,
    noise: Any,
    index: int,
    *,
    wants_probs: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Draws by the race at the token's position; Args as `draw_by_inversion`.

    Returns no probabilities: drafter and target share this noise, so the ratio test does not apply.
    """
    if logits_filter.is_greedy:
        return logits.argmax(dim=-1), None
    return noise.race(logits, logits_filter, index), None
