"""Uncertainty of a measured number: bootstrap intervals over clusters.

Steps of one text depend on each other, so what is resampled is a *cluster*: a prompt with all its
turns and samples (for rates), or a batch of prompts (for times).

Legend: n clusters, m totals of a cluster, R resamples, s statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from specdec.arguments import check_integer, check_number, check_type

Statistic = Callable[[np.ndarray], np.ndarray]
"""Totals `[..., m]` -> statistics `[..., s]`."""

LEVEL = 0.95
NUM_RESAMPLES = 2000
MIN_CLUSTERS = 6
"""Fewer clusters get no interval: it would cover the truth less often than its level."""


@dataclass(frozen=True)
class Estimate:
    """A number with its interval.

    Args:
        value: of all the data.
        low: lower end of the interval; NaN where there are fewer than 6 clusters.
        high: upper end.
        level: share of repetitions of the experiment whose interval covers the truth.
        note: why there is no interval; printed where no format is given.

    Example:
        >>> print(Estimate(2.684, 2.61, 2.752))
        2.68 [2.61, 2.75]
        >>> print(Estimate(2.684, note="no interval: 3 texts"))
        2.68 (no interval: 3 texts)
        >>> print(f"{Estimate(2.684, note='no interval: 3 texts'):.1f}")
        2.7
        >>> Estimate(2.0, 1.9, 2.1).overlaps(Estimate(2.2, 2.0, 2.4))
        True
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    level: float = LEVEL
    note: str = ""

    def __post_init__(self):
        for name in ("value", "low", "high", "level"):
            check_type(name, getattr(self, name), float)
        check_type("note", self.note, str)
        if self.low > self.high:
            raise ValueError(f"low must be at most high, got {self.low} and {self.high}")

    @property
    def has_interval(self) -> bool:
        """Whether the interval is known."""
        return not math.isnan(self.low)

    def overlaps(self, other: Estimate) -> bool:
        """Whether the two intervals share a value; an interval that is not known overlaps all."""
        return not (self.high < other.low or other.high < self.low)

    def covers(self, value: float) -> bool:
        """Whether a value lies in the interval."""
        return self.low <= value <= self.high

    def to_dict(self) -> dict[str, float | None]:
        """As JSON can hold it: `None` for what is not known."""
        values = {"value": self.value, "low": self.low, "high": self.high, "level": self.level}
        return {name: None if math.isnan(value) else value for name, value in values.items()}

    def __format__(self, spec: str) -> str:
        note = "" if spec or not self.note else f" ({self.note})"
        spec = spec or ".2f"
        if not self.has_interval:
            return f"{self.value:{spec}}{note}"
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"

    def __str__(self) -> str:
        return format(self)


def bootstrap(
    totals: np.ndarray,
    statistic: Statistic,
    *,
    level: float = LEVEL,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
    unit: str = "cluster",
) -> list[Estimate]:
    """Statistics of summed totals, with bootstrap intervals over the clusters.

    Percentiles of the resampled statistics, taken further out so that intervals of few clusters
    are as wide as Student's: the percentile is `Phi(sqrt(n / (n - 1)) t)` of the t quantile with
    n - 1 degrees of freedom (the expanded percentile interval).

    Args:
        totals: `[n, m]`, of each cluster.
        statistic: from summed totals to the statistics.
        level: of the intervals.
        num_resamples: R.
        seed: of the resampling, so that the same data gives the same interval.
        unit: what a cluster is, in the note of estimates without an interval.

    Raises:
        ValueError: no clusters, or a level outside 0..1.

    Example:
        >>> totals = np.array([[3.0, 2.0], [5.0, 2.0], [4.0, 2.0]] * 2)
        >>> (rate,) = bootstrap(totals, lambda sums: sums[..., :1] / sums[..., 1:])
        >>> rate.value, rate.covers(2.0)
        (2.0, True)

    Reference: Hesterberg, arXiv:1411.5279, section 5.3 (expanded percentile intervals).
    """
    check_type("statistic", statistic, Callable)
    check_number("level", level, above=0, below=1)
    check_integer("num_resamples", num_resamples, 1)
    check_integer("seed", seed, 0)
    check_type("unit", unit, str)
    try:
        totals = np.asarray(totals, dtype=np.float64)
    except ValueError as error:
        raise ValueError(f"totals must be numbers [n, m]: {error}") from error
    if totals.ndim != 2 or not len(totals):
        raise ValueError(f"totals must be [n, m] with at least one cluster, got {totals.shape}")
    values = np.atleast_1d(statistic(totals.sum(axis=0)))
    if np.shape(statistic(totals)) != (len(totals), *values.shape):
        raise ValueError(
            "statistic must map totals [..., m] to statistics [..., s], got "
            f"{list(np.shape(statistic(totals)))} for {list(totals.shape)}"
        )
    if len(totals) < MIN_CLUSTERS:
        return without_interval(values, len(totals), level, unit)
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(len(totals), [1 / len(totals)] * len(totals), num_resamples)
    return between(values, statistic(counts @ totals), len(totals), level)


def without_interval(
    values: Iterable[float], count: int, level: float, unit: str
) -> list[Estimate]:
    """Estimates of too few clusters.

    Args:
        values: `[s]`.
        count: n.
        level: that an interval would have had.
        unit: what a cluster is.
    """
    note = f"no interval: {counted(count, unit)}"
    return [Estimate(float(value), level=level, note=note) for value in values]


def counted(count: int, unit: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "text"), counted(2, "batch")
        ('1 text', '2 batches')
    """
    plural = "" if count == 1 else "es" if unit.endswith("ch") else "s"
    return f"{count} {unit}{plural}"


def between(values: np.ndarray, resampled: np.ndarray, n: int, level: float) -> list[Estimate]:
    """Estimates from resampled statistics.

    Args:
        values: `[s]`, of all the data.
        resampled: `[R, s]`; NaN where a resample had nothing to divide by.
        n: clusters.
        level: of the intervals.
    """
    tail = expanded_tail((1 - level) / 2, n)
    resampled = np.asarray(resampled)
    ends = np.full((2, resampled.shape[1]), np.nan)
    known = ~np.isnan(resampled).all(axis=0)
    ends[:, known] = np.nanquantile(resampled[:, known], [tail, 1 - tail], axis=0)
    return [
        Estimate(float(value), float(low), float(high), level)
        for value, low, high in zip(values, *ends, strict=True)
    ]


def expanded_tail(tail: float, n: int) -> float:
    """The percentile whose bootstrap quantile is as far out as Student's t for n clusters.

    Example:
        >>> expanded_tail(0.025, 10**6), round(expanded_tail(0.025, 10), 4)
        (0.025, 0.0086)
    """
    if n > 1000:  # they agree to 3e-4
        return tail
    return NormalDist().cdf(math.sqrt(n / (n - 1)) * student_quantile(tail, n - 1))


def student_quantile(probability: float, degrees: int) -> float:
    """A quantile of Student's t, by bisection of its distribution function.

    Example:
        >>> round(student_quantile(0.975, 9), 3)
        2.262
    """
    low, high = -1e3, 1e3
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _student_cdf(t: float, degrees: int) -> float:
    """The distribution function for whole degrees of freedom: a finite sum (Abramowitz and Stegun,
    26.7.3 and 26.7.4).
    """
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle)
    term, total = (cosine if degrees % 2 else 1.0), 0.0
    for j in range(1 if degrees % 2 else 0, degrees - 1, 2):
        total += term
        term *= cosine**2 * (j + 1) / (j + 2)
    if degrees % 2:
        return 0.5 + (angle + math.sin(angle) * total) / math.pi
    return 0.5 + math.sin(angle) * total / 2
