"""Pearson's chi-square test, and what it can see.

The statistic of n independent draws from p + d, where p is the expected distribution, has
noncentrality n sum d^2 / p >= 4 n TV^2. So the noncentrality that a power needs is a bound on the
total variation that the test detects with that power, whatever the difference looks like.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping

DETECTABLE = (
    "detectable TV: the total variation (half the sum of |differences of probabilities|) that a "
    "test sees with 99 % power"
)
SMALLEST_CELL = 10.0
"""Cells that expect fewer counts are merged into one."""


def detectable_variation(num_draws: int, df: int, chance: float, power: float = 0.99) -> float:
    """The smallest total variation that a test is sure to detect with a given power.

    Args:
        num_draws: n.
        df: degrees of freedom; without any, nothing is detected.
        chance: of a false alarm.
        power: chance to detect.

    Example:
        >>> round(detectable_variation(10_000, 5, 1e-9), 3)
        0.046
    """
    from scipy.special import chdtri, chndtrinc

    if df == 0:
        return 1.0
    noncentrality = chndtrinc(chdtri(df, chance), df, 1 - power)
    return min(1.0, math.sqrt(noncentrality / (4 * num_draws)))


def goodness_of_fit(observed: Counter, law: Mapping[Hashable, float]) -> tuple[float, int]:
    """Compares counts with a distribution.

    Args:
        observed: counts by outcome.
        law: probabilities by outcome; what is missing is impossible.

    Returns:
        The p-value, 0 if something impossible happened, and the degrees of freedom.
    """
    from scipy.special import chdtrc

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
    return (float(chdtrc(df, statistic)) if df else 1.0), df
