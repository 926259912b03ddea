"""Pearson's chi-square test, and what it can see.

For counts of n independent draws the statistic has, under a law at distances d from the expected
one p, noncentrality n sum d^2 / p >= 4 n TV^2. So the noncentrality that a power needs is a bound
on the total variation that the test detects with that power, whatever the difference looks like.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

SMALLEST_CELL = 10.0
"""Cells that expect fewer counts are merged into one."""


def chi2_sf(statistic: float, df: int) -> float:
    """P(chi-square with `df` degrees of freedom > statistic).

    Example:
        >>> round(chi2_sf(3.841, 1), 3)
        0.05
    """
    return _survival(statistic, torch.tensor([df])).item()


def chi2_isf(chance: float, df: int) -> float:
    """The statistic that is exceeded with this chance, in 0..1."""
    low, high = 0.0, 1.0
    while chi2_sf(high, df) > chance:
        high *= 2
    return _bisect(lambda x: chi2_sf(x, df) > chance, low, high)


def noncentral_chi2_sf(statistic: float, df: int, noncentrality: float) -> float:
    """P(noncentral chi-square > statistic), as a Poisson mixture of central ones.

    Reference: Johnson, Kotz and Balakrishnan, Continuous Univariate Distributions 2, Eq. 29.3.
    """
    half = noncentrality / 2
    spread = 12 * math.sqrt(half) + 40
    first = max(0, math.floor(half - spread))
    j = torch.arange(first, math.ceil(half + spread), dtype=torch.float64)
    log_weight = torch.xlogy(j, torch.tensor(half).double()) - half - torch.lgamma(j + 1)
    return (log_weight.exp() * _survival(statistic, df + 2 * j)).sum().item()


def detectable_variation(num_draws: int, df: int, chance: float, power: float = 0.99) -> float:
    """The smallest total variation that a test is sure to detect with a given power.

    Args:
        num_draws: n.
        df: degrees of freedom.
        chance: of a false alarm.
        power: chance to detect.

    Example:
        >>> round(detectable_variation(10_000, 5, 1e-9), 3)
        0.046
    """
    critical = chi2_isf(chance, df)
    high = 1.0
    while noncentral_chi2_sf(critical, df, high) < power:
        high *= 2
    needed = _bisect(lambda x: noncentral_chi2_sf(critical, df, x) < power, 0.0, high)
    return min(1.0, math.sqrt(needed / (4 * num_draws)))


def goodness_of_fit(observed: Counter, law: Mapping[Hashable, float]) -> tuple[float, int]:
    """Compares counts with a law.

    Args:
        observed: counts by outcome.
        law: probabilities by outcome; what is missing is impossible.

    Returns:
        The p-value, 0 if something impossible happened, and the degrees of freedom.
    """
    num_draws = sum(observed.values())
    expected = {cell: num_draws * p for cell, p in law.items() if p > 0}
    if observed.keys() - expected.keys():
        return 0.0, len(expected) - 1
    large = [(observed[c], count) for c, count in expected.items() if count >= SMALLEST_CELL]
    small = [c for c, count in expected.items() if count < SMALLEST_CELL]
    if small:
        large.append((sum(observed[c] for c in small), sum(expected[c] for c in small)))
    statistic = sum((seen - count) ** 2 / count for seen, count in large)
    df = len(large) - 1
    return (chi2_sf(statistic, df) if df else 1.0), df


def _survival(statistic: float, df: Tensor) -> Tensor:
    at = torch.full(df.shape, statistic / 2, dtype=torch.float64)
    return torch.special.gammaincc(df.double() / 2, at)


def _bisect(is_below, low: float, high: float) -> float:
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return high
