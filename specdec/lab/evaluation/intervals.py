"""Uncertainty of a measured number: bootstrap intervals over clusters.

Steps of one text depend on each other, so what is resampled is a *cluster*: a prompt with all its
turns and samples (for rates), or all batches with prompts in common (for times).

An interval is of one number. Which of several numbers differ is another question, whose answers
hold together (`paired_p_values` and `holm`).

Legend: n clusters, m totals of a cluster, R resamples, s statistics, K draft tokens, c cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from specdec.arguments import check_integer, check_number
from specdec.lab.show.table import Table

LEVEL = 0.95
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
        note: what the number is, or why it has no interval; printed where no format is given.

    Example:
        >>> print(Estimate(2.684, 2.61, 2.752))
        2.68 [2.61, 2.75]
        >>> print(Estimate(2.684, note="no interval: 3 texts"))
        2.68 (no interval: 3 texts)
        >>> print(f"{Estimate(2.684, note='no interval: 3 texts'):.1f}")
        2.7
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
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]{note}"

    def __str__(self) -> str:
        return format(self)


def bootstrap(
    totals: ArrayLike,
    statistic: Callable[[np.ndarray], np.ndarray],
    *,
    level: float = LEVEL,
    num_resamples: int | None = None,
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
        num_resamples: R; by default 10 000, more of few clusters, fewer of thousands.
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
    num_resamples: int | None = None,
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
    if num_resamples is None:
        num_resamples = _num_resamples(sizes[0])
    check_integer("num_resamples", num_resamples, 1)
    values = statistic(*(np.ones((1, n), dtype=int) for n in sizes))[0]
    if sizes[0] < MIN_CLUSTERS:
        note = f"no interval: {counted(sizes[0], unit)}"
        return [Estimate(float(value), level=level, note=note) for value in values]
    found = statistic(*(_counts(n, num_resamples, seed, i) for i, n in enumerate(sizes)))
    tail = expanded_tail((1 - level) / 2, sizes[0])
    ends = np.full((2, found.shape[1]), np.nan)
    known = ~np.isnan(found).all(axis=0)
    ends[:, known] = np.nanquantile(found[:, known], [tail, 1 - tail], axis=0)
    return [
        Estimate(float(value), float(low), float(high), level)
        for value, low, high in zip(values, *ends, strict=True)
    ]


def _num_resamples(n: int) -> int:
    """More of few clusters, whose percentiles lie further out; fewer of thousands, for memory."""
    return max(2_000, min(max(10_000, 400_000 // n), 10_000_000 // n))


@lru_cache(2)
def _counts(n: int, num_resamples: int, seed: int, index: int) -> np.ndarray:
    """How often each of n members is taken, `[R, n]`; kept, since a table needs it many times."""
    draws = np.random.default_rng([seed, index]).integers(n, size=(num_resamples, n))
    draws += n * np.arange(num_resamples)[:, None]
    counts = np.bincount(draws.ravel(), minlength=num_resamples * n)
    counts = counts.reshape(num_resamples, n).astype(np.float64)
    counts.flags.writeable = False
    return counts


def taken(counts: np.ndarray) -> np.ndarray:
    """The members `[R, n]` that are taken so often, for statistics of more than sums.

    Example:
        >>> taken(np.array([[2, 0, 1]])).tolist()
        [[0, 0, 2]]
    """
    rows, n = counts.shape
    times = counts.ravel().astype(int)
    return np.repeat(np.tile(np.arange(n), rows), times).reshape(rows, n)


def expanded_tail(tail: float, n: int) -> float:
    """The percentile whose bootstrap quantile is as far out as Student's t for n clusters.

    Example:
        >>> round(expanded_tail(0.025, 10**6), 5), round(expanded_tail(0.025, 10), 4)
        (0.025, 0.0086)
    """
    from scipy import special  # on use, so that `import specdec` stays fast

    return float(special.ndtr(math.sqrt(n / (n - 1)) * special.stdtrit(n - 1, tail)))


def paired_p_values(totals: ArrayLike) -> np.ndarray:
    """Of each two of c ratios that were measured on the same clusters: how probable a difference
    as large as the observed one is if they are equal.

    A t test of the ratios' linear parts. Its degrees of freedom are those of a variance that is
    estimated from clusters of unequal weights: n - 1 where all weigh the same.

    Args:
        totals: `[n, c, 2]`, of each cluster and cell, what is divided and by what.

    Returns:
        `[c, c]`, two-sided; 1 where nothing can be told: fewer than 6 clusters, a ratio that is not
        known, or two that are equal in every cluster.

    Example:
        >>> totals = np.array([[[3.0, 2.0], [5.0, 2.0]], [[2.0, 2.0], [4.1, 2.0]]] * 4)
        >>> float(paired_p_values(totals)[0, 1]) < 1e-6
        True

    Reference: Cochran, Sampling Techniques, 1977 (variance of a ratio); Satterthwaite, An
    approximate distribution of estimates of variance components, 1946 (degrees of freedom).
    """
    from scipy import special  # on use, so that `import specdec` stays fast

    totals = np.asarray(totals, dtype=np.float64)
    n, values = len(totals), ratio(totals.sum(axis=0))[:, 0]
    if n < MIN_CLUSTERS:
        return np.ones((len(values), len(values)))
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = totals[..., 1] / totals[..., 1].sum(axis=0)  # [n, c], NaN of what is not known
        parts = totals[..., 0] / totals[..., 1].sum(axis=0) - values * weights  # sum to 0
        covariance = parts.T @ parts * n / (n - 1)
        own = np.diag(covariance)
        variances = own[:, None] + own - 2 * covariance
        variances[variances <= 1e-12 * (own[:, None] + own)] = 0.0  # rounding
        differences = np.abs(values[:, None] - values)
        differences[differences <= 1e-12 * np.abs(values)] = 0.0
        squares = np.nan_to_num(weights).sum(axis=1) ** 2
        freedom = squares.sum() ** 2 / (squares**2).sum() - 1
        p_values = 2 * special.stdtr(freedom, -differences / np.sqrt(variances))
    return np.where(np.isnan(p_values), 1.0, p_values)


def holm(p_values: ArrayLike) -> np.ndarray:
    """P-values of a family of tests that hold together: to reject all at most 0.05 rejects a true
    hypothesis, even one, with probability 0.05 at most, however the tests depend on each other.

    Example:
        >>> holm([0.01, 0.04, 0.03]).round(3).tolist()
        [0.03, 0.06, 0.06]

    Reference: Holm, A simple sequentially rejective multiple test procedure, 1979.
    """
    p_values = np.asarray(p_values, dtype=np.float64)
    order = p_values.argsort()
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.empty_like(p_values)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(factors * p_values[order]))
    return adjusted


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
