"""Uncertainty of a measured number: bootstrap intervals over clusters.

Steps of one text depend on each other, so what is resampled is a *cluster*: a prompt with all its
turns and samples (for rates), or a batch of prompts (for times).

Legend: n clusters, m totals of a cluster, R resamples, s statistics, K draft tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike

from specdec.arguments import check_integer, check_number
from specdec.show.table import Table

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
        values = {name: value for name, value in asdict(self).items() if name != "note"}
        return {name: None if math.isnan(value) else value for name, value in values.items()}

    def __format__(self, spec: str) -> str:
        note = "" if spec or not self.note else f" ({self.note})"
        spec = spec or ".2f"
        if math.isnan(self.value):
            return f"not known{note}"
        if not self.has_interval:
            return f"{self.value:{spec}}{note}"
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"

    def __str__(self) -> str:
        return format(self)


def bootstrap(
    totals: ArrayLike,
    statistic: Callable[[np.ndarray], np.ndarray],
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
        statistic: from summed totals `[..., m]` to the statistics `[..., s]`.
        level: of the intervals.
        num_resamples: R.
        seed: of the resampling, so that the same data gives the same interval.
        unit: what a cluster is, in the note of estimates without an interval.

    Example:
        >>> totals = np.array([[3.0, 2.0], [5.0, 2.0], [4.0, 2.0]] * 2)
        >>> (rate,) = bootstrap(totals, lambda sums: sums[..., :1] / sums[..., 1:])
        >>> rate.value, rate.covers(2.0)
        (2.0, True)

    Reference: Hesterberg, arXiv:1411.5279, section 5.3 (expanded percentile intervals).
    """
    totals = np.asarray(totals, dtype=np.float64)
    if totals.ndim != 2 or not len(totals):
        raise ValueError(f"totals must be [n, m] with at least one cluster, got {totals.shape}")
    options = {"level": level, "num_resamples": num_resamples, "seed": seed, "unit": unit}
    return resampled(lambda counts: statistic(counts @ totals), [len(totals)], **options)


def resampled(
    statistic: Callable[..., np.ndarray],
    sizes: Sequence[int],
    *,
    level: float = LEVEL,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
    unit: str = "cluster",
) -> list[Estimate]:
    """Statistics of several samples that are resampled independently, with intervals.

    Args:
        statistic: from how often each member of each sample is taken, `[R, n]` for every sample, to
            the statistics `[R, s]`, NaN where a resample has nothing to divide by.
        sizes: n of each sample; the first one is of the clusters, too few of which get no interval.
        level, num_resamples, seed, unit: as in `bootstrap`.
    """
    check_number("level", level, above=0, below=1)
    check_integer("num_resamples", num_resamples, 1)
    values = statistic(*(np.ones((1, n), dtype=int) for n in sizes))[0]
    if sizes[0] < MIN_CLUSTERS:
        note = f"no interval: {counted(sizes[0], unit)}"
        return [Estimate(float(value), level=level, note=note) for value in values]
    draws = np.random.default_rng(seed)
    found = statistic(*(draws.multinomial(n, [1 / n] * n, num_resamples) for n in sizes))
    tail = expanded_tail((1 - level) / 2, sizes[0])
    ends = np.full((2, found.shape[1]), np.nan)
    known = ~np.isnan(found).all(axis=0)
    ends[:, known] = np.nanquantile(found[:, known], [tail, 1 - tail], axis=0)
    return [
        Estimate(float(value), float(low), float(high), level)
        for value, low, high in zip(values, *ends, strict=True)
    ]


def taken(counts: np.ndarray) -> np.ndarray:
    """The members `[R, n]` that are taken so often, for statistics of more than sums.

    Example:
        >>> taken(np.array([[2, 0, 1]])).tolist()
        [[0, 0, 2]]
    """
    rows, n = counts.shape
    return np.repeat(np.tile(np.arange(n), rows), counts.ravel()).reshape(rows, n)


def expanded_tail(tail: float, n: int) -> float:
    """The percentile whose bootstrap quantile is as far out as Student's t for n clusters.

    Example:
        >>> round(expanded_tail(0.025, 10**6), 5), round(expanded_tail(0.025, 10), 4)
        (0.025, 0.0086)
    """
    from scipy import special  # on use, so that `import specdec` stays fast

    return float(special.ndtr(math.sqrt(n / (n - 1)) * special.stdtrit(n - 1, tail)))


def rate_estimates(totals: ArrayLike, k: int, *, level: float, unit: str) -> dict[str, Estimate]:
    """`acceptance_length`, `acceptance_rate`, `conditional_rate_1..K` and `joint_rate_1..K`.

    Args:
        totals: `[n, 3 + 2 K]` steps, drafted and accepted tokens of each cluster, then steps that
            accepted, and that reached, each position.
        k: K.
        level, unit: as in `bootstrap`.
    """
    names = ["acceptance_length", "acceptance_rate"]
    names += [f"{rate}_rate_{i + 1}" for rate in ("conditional", "joint") for i in range(k)]

    def rates(sums: np.ndarray) -> np.ndarray:
        steps, drafted, accepted = (sums[..., i : i + 1] for i in range(3))
        accepted_at, reached_at = sums[..., 3 : 3 + k], sums[..., 3 + k :]
        with np.errstate(divide="ignore", invalid="ignore"):  # NaN where nothing was drafted
            columns = 1 + accepted / steps, accepted / drafted, accepted_at / reached_at
            return np.concatenate([*columns, accepted_at / steps], axis=-1)

    return dict(zip(names, bootstrap(totals, rates, level=level, unit=unit), strict=True))


def ratio(sums: np.ndarray) -> np.ndarray:
    """The first of two totals / the second, NaN or infinity where that is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return sums[..., :1] / sums[..., 1:]


def rates_by_position(estimates: Mapping[str, Estimate], reached: Iterable[float]) -> Table:
    """Acceptance at each draft position, which so many steps reached, with intervals."""
    rates = ("conditional", "joint")
    rows = [
        [str(i), f"{count:.0f}", *(format(estimates[f"{rate}_rate_{i}"], ".2f") for rate in rates)]
        for i, count in enumerate(reached, start=1)
    ]
    return Table(["position", "reached", "conditional rate", "joint rate"], rows)


def counted(count: int, unit: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "text"), counted(2, "batch")
        ('1 text', '2 batches')
    """
    plural = "" if count == 1 else "es" if unit.endswith("ch") else "s"
    return f"{count} {unit}{plural}"
