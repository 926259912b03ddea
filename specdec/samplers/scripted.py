"""Numbers that are given instead of drawn: for certificates and tests."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from specdec.kernels.race.reference import first_arrival

if TYPE_CHECKING:
    from specdec.samplers.logits_filter import LogitsFilter


class NotScriptedError(ValueError):
    """Numbers were asked for that a `ScriptedNoise` does not have."""

    def __init__(self, asked: str):
        super().__init__(f"no numbers were given for {asked}; pass them to ScriptedNoise")
        self.asked = asked


class ScriptedNoise:
    """Numbers that are given instead of drawn: for certificates and tests.

    Args:
        uniforms: `[B, streams, W]` float64 in [0, 1).
        exponentials: the arrival times of the races after the root, `[B, W, V]`, or `[B, P, W, V]`
            of P races at each position, by `path`.
        named: uniforms `[B, n]` by a rule's own names.

    Raises:
        NotScriptedError: when numbers are asked for that were not given.

    Example:
        >>> from specdec.samplers import Stream
        >>> noise = ScriptedNoise(torch.zeros(1, len(Stream), 3, dtype=torch.float64))
        >>> noise.uniform(Stream.ACCEPT)
        tensor([[0., 0., 0.]], dtype=torch.float64)
    """

    def __init__(
        self,
        uniforms: Tensor | None = None,
        exponentials: Tensor | None = None,
        named: Mapping[str, Tensor] | None = None,
    ):
        self._uniforms, self._named = uniforms, named or {}
        self._exponentials = exponentials
        if exponentials is not None and exponentials.dim() == 3:
            self._exponentials = exponentials[:, None]
        self.path: Tensor | int = 0
        self._depths: Tensor | int | None = None

    def at_depths(self, depths: Tensor | int, path: Tensor | int = 0) -> Self:
        """As `StepNoise.at_depths`."""
        other = copy.copy(self)
        other._depths, other.path = depths, path
        return other

    def uniform(self, stream: int | str, num: int | None = None) -> Tensor:
        """As `StepNoise.uniform`."""
        if not isinstance(stream, str):
            return self._uniforms[:, stream]
        given = self._named.get(stream)
        if given is None or given.shape[1] < (num or 0):
            raise NotScriptedError(f"uniform({stream!r}, {num})")
        return given[:, :num]

    def race(
        self,
        logits: Tensor,
        logits_filter: LogitsFilter,
        index: int,
        *,
        path: Tensor | int = 0,
    ) -> Tensor:
        """As `StepNoise.race`."""
        return first_arrival(logits_filter(logits), self.arrivals(logits, index, path=path))

    def arrivals(self, logits: Tensor, index: int, *, path: Tensor | int = 0) -> Tensor:
        """As `StepNoise.arrivals`."""
        given = self._exponentials
        if given is None or int(torch.as_tensor(path, device="cpu").max()) >= given.shape[1]:
            raise NotScriptedError(f"a race of path {path}")
        rows, count, _ = logits.shape
        if self._depths is None:
            depths = torch.arange(index, index + count, device=given.device)
        else:
            depths = torch.as_tensor(self._depths, device=given.device)
        depths = depths.expand(rows, count)
        every = torch.arange(rows, device=given.device)[:, None]
        path = torch.as_tensor(path, device=given.device).expand(rows, count)
        return given[every, path, depths]

    def exponentials(self, vocab_size: int) -> Tensor:
        """As `StepNoise.exponentials`: those after the root."""
        return self._exponentials[:, 0, 0]
