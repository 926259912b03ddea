"""`Warp`: the one gate from logits to probabilities. Past it only probabilities flow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.kernels.reference import draw

Values = float | int | None | Sequence


class Warp:
    """Temperature, top-k, top-p and min-p, one value per row, in the order in which HF applies its
    logits warpers.

    Temperature 0 is the limit: a one-hot law on the largest logit, the lowest id among equals. Rows
    may mix.

    Args:
        batch_size: rows B.
        temperature: > 0, or 0 for greedy.
        top_k: keep the k largest logits, ties at the k-th included; `None` or 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p; `None` or 1
            keeps all.
        min_p: keep tokens with at least `min_p` times the largest probability; `None` or 0 keeps
            all.
        device: where the values live.

    Each is a scalar or a sequence of one value per row.

    Raises:
        ValueError: a value out of range, or a sequence whose length is not `batch_size`.

    Example:
        >>> warp = Warp(2, temperature=[0.0, 1.0])
        >>> warp(torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
        tensor([[1.0000, 0.0000, 0.0000],
                [0.3333, 0.3333, 0.3333]])

    Reference: top-p is Holtzman et al. (arXiv:1904.09751), min-p Nguyen et al. (arXiv:2407.01082).
    """

    def __init__(
        self,
        batch_size: int,
        *,
        temperature: Values = 1.0,
        top_k: Values = None,
        top_p: Values = None,
        min_p: Values = None,
        device: torch.device | str = "cpu",
    ):
        temperatures = _per_row(
            "temperature", temperature, batch_size, 1.0, "a number >= 0", _is_temperature
        )
        top_ks = _per_row("top_k", top_k, batch_size, 0, "an integer >= 0 (0 keeps all)", _is_count)
        top_ps = _per_row("top_p", top_p, batch_size, 1.0, "a number in 0..1", _is_fraction)
        min_ps = _per_row("min_p", min_p, batch_size, 0.0, "a number in 0..1", _is_fraction)
        self.batch_size = batch_size
        self.is_greedy = all(t == 0 for t in temperatures)
        """Every row is greedy. Known to the host, so work that no row needs is left out when the
        warp is built.
        """
        self._some_greedy = any(t == 0 for t in temperatures)
        self._largest_k = max(top_ks, default=0)
        self._truncations: list[Callable[[Tensor], Tensor]] = []
        if any(top_ks):
            self._truncations.append(self._keep_top_k)
        if any(p < 1 for p in top_ps):
            self._truncations.append(self._keep_top_p)
        if any(min_ps):
            self._truncations.append(self._keep_min_p)

        def column(values: list, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self._temperature = column([t or 1.0 for t in temperatures], torch.float64)
        self._scales = any(t not in (0, 1) for t in temperatures)
        self._greedy = column([t == 0 for t in temperatures], torch.bool)
        self._top_k = column(top_ks, torch.long)
        # A token goes while the mass up to and including it, from the least likely, is <= 1 -
        # top_p.
        self._tail = column([1 - p if p < 1 else -1.0 for p in top_ps], torch.float64)
        self._min_p = column(min_ps, torch.float64)

    def __call__(self, logits: Tensor) -> Tensor:
        """The law of each row.

        Args:
            logits: `[B, V]` or `[B, N, V]`; half precision is widened to float32 first.

        Returns:
            Probabilities of the same shape, float32 (float64 for float64 logits).
        """
        logits = _widen(logits)
        if self.is_greedy:
            return _one_hot_argmax(logits)
        scaled = logits / _like(self._temperature, logits) if self._scales else logits
        for truncate in self._truncations:
            scaled = truncate(scaled)
        probs = torch.softmax(scaled, dim=-1)
        if self._some_greedy:
            probs = torch.where(_like(self._greedy, logits), _one_hot_argmax(logits), probs)
        return probs

    def draw(self, logits: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens and the laws that they were drawn from.

        Args:
            logits: `[B, V]` or `[B, N, V]`.
            uniforms: `[B]` or `[B, N]` float64 in [0, 1); may be `None` where every row is greedy.

        Returns:
            Tokens `[B]` or `[B, N]`, and their laws of the shape of `logits`; `None` where
            every row is greedy, since a one-hot law is a point mass on the token.
        """
        if self.is_greedy:
            return logits.argmax(dim=-1), None
        probs = self(logits)
        return draw(probs, uniforms), probs

    def _keep_top_k(self, logits: Tensor) -> Tensor:
        largest = logits.topk(min(self._largest_k, logits.shape[-1]), dim=-1).values
        kth = _like(self._top_k, logits).clamp(1, largest.shape[-1]) - 1
        threshold = largest.gather(-1, kth.expand(*logits.shape[:-1], 1))
        return logits.masked_fill((logits < threshold) & _like(self._top_k > 0, logits), -math.inf)

    def _keep_top_p(self, logits: Tensor) -> Tensor:
        ascending, order = logits.sort(dim=-1)
        gone = ascending.softmax(dim=-1).cumsum(dim=-1) <= _like(self._tail, logits)
        gone[..., -1] = False
        return logits.masked_fill(torch.zeros_like(gone).scatter(-1, order, gone), -math.inf)

    def _keep_min_p(self, logits: Tensor) -> Tensor:
        probs = logits.softmax(dim=-1)
        return logits.masked_fill(
            probs < _like(self._min_p, logits) * probs.amax(-1, keepdim=True), -math.inf
        )


def _widen(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _one_hot_argmax(logits: Tensor) -> Tensor:
    # torch.argmax documents the first of equal maxima: the lowest id.
    best = logits.argmax(dim=-1, keepdim=True)
    return torch.zeros_like(logits).scatter_(-1, best, 1.0)


def _like(column: Tensor, logits: Tensor) -> Tensor:
    """Per-row values shaped and typed to meet `[B, ..., V]`."""
    column = column.to(logits.dtype) if column.is_floating_point() else column
    return column.view(-1, *[1] * (logits.dim() - 1))


def _is_temperature(value) -> bool:
    return 0 <= value < math.inf


def _is_count(value) -> bool:
    return value >= 0 and int(value) == value


def _is_fraction(value) -> bool:
    return 0 <= value <= 1


def _per_row(
    name: str, given: Values, rows: int, default, expected: str, is_valid: Callable
) -> list:
    if isinstance(given, Tensor):
        given = given.tolist()
    values = (
        list(given)
        if isinstance(given, Sequence) and not isinstance(given, str)
        else [given] * rows
    )
    if len(values) != rows:
        raise ValueError(
            f"{name} has {len(values)} values for a batch of {rows} rows; give one per row, or a "
            "single value"
        )
    values = [default if value is None else value for value in values]
    for row, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_valid(value):
            raise ValueError(f"{name} must be {expected}, got {value!r} in row {row}")
    return values
