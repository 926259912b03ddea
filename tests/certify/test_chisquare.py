"""The chi-square test of `certify` is that of scipy: tails, power, and Pearson's statistic."""

from collections import Counter

import pytest
import scipy.stats

from specdec.certify.generator.chisquare import (
    chi2_isf,
    chi2_sf,
    detectable_variation,
    goodness_of_fit,
    noncentral_chi2_sf,
)


@pytest.mark.parametrize("df", [1, 3, 15, 63, 400])
def test_the_tails_of_chi_square_are_those_of_scipy(df):
    for chance in (0.5, 1e-3, 1e-7, 1e-12):
        critical = scipy.stats.chi2.isf(chance, df)
        assert chi2_isf(chance, df) == pytest.approx(critical, rel=1e-6)
        assert chi2_sf(critical, df) == pytest.approx(chance, rel=1e-6)
        for noncentrality in (0.5, 20.0, 300.0):
            expected = scipy.stats.ncx2.sf(critical, df, noncentrality)
            assert noncentral_chi2_sf(critical, df, noncentrality) == pytest.approx(
                expected, rel=1e-6, abs=1e-12
            )


@pytest.mark.parametrize(("num_draws", "df"), [(2000, 3), (4096, 15), (10_000, 63)])
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
