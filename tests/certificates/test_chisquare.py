"""The chi-square test of `certify`: Pearson's statistic, and the variation that it detects."""

from collections import Counter

import pytest
import scipy.stats

from specdec.lab.certificates.chisquare import detectable_variation, goodness_of_fit


@pytest.mark.parametrize(
    ("num_draws", "df"), [(2000, 3), (4096, 15), (10_000, 63), (1 << 16, 5000)]
)
def test_the_detectable_variation_is_detected_with_the_power_it_says(num_draws, df):
    variation = detectable_variation(num_draws, df, 1e-6 / 3)
    critical = scipy.stats.chi2.isf(1e-6 / 3, df)
    power = scipy.stats.ncx2.sf(critical, df, num_draws * 4 * variation**2)
    assert power == pytest.approx(0.99, abs=1e-6)


def test_the_fit_of_counts_is_pearsons_and_small_cells_are_merged():
    law = {"a": 0.5, "b": 0.3, "c": 0.19, "d": 0.006, "e": 0.004, "never": 0.0}
    counts = Counter({"a": 520, "b": 270, "c": 195, "d": 10, "e": 5})
    p_value, df = goodness_of_fit(counts, law)
    expected = scipy.stats.chisquare([520, 270, 195, 15], [500, 300, 190, 10])
    assert df == 3
    assert p_value == pytest.approx(expected.pvalue)
    assert goodness_of_fit(counts + Counter(never=1), law)[0] == 0
    assert goodness_of_fit(Counter(a=7), {"a": 1.0}) == (1.0, 0)
    assert detectable_variation(7, 0, 1e-6) == 1.0
