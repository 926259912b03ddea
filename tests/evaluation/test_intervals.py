"""Intervals cover the truth as often as they say, when what is resampled is the cluster."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specdec.lab.evaluation.intervals import (
    MIN_CLUSTERS,
    bootstrap,
    expanded_tail,
    holm,
    paired_p_values,
)


def mean(sums):
    return sums[..., :1] / sums[..., 1:]


def test_the_tail_is_that_of_the_level_for_many_clusters_and_further_out_for_few():
    """By Student's t for 9 degrees of freedom: t = -2.262157 at 0.025, and Phi(-2.384524)."""
    tails = [expanded_tail(0.025, n) for n in (6, 10, 100, 10_000)]
    assert tails == sorted(tails)
    assert tails[1] == pytest.approx(0.00855064, rel=1e-5)
    assert tails[-1] == pytest.approx(0.025, abs=3e-5)


def prompts(rng, n: int) -> np.ndarray:
    """Accepted tokens and steps of n prompts that are easy or hard as a whole."""
    ease = rng.beta(4, 3, size=n)
    steps = rng.integers(10, 60, size=n)
    accepted = [
        (rng.geometric(1 - a, size=s) - 1).clip(max=4).sum()
        for a, s in zip(ease, steps, strict=True)
    ]
    return np.stack([accepted, steps], axis=1).astype(float)


@pytest.mark.parametrize("n", [10, 40])
def test_intervals_of_a_simulated_experiment_cover_the_truth_as_often_as_they_say(n):
    rng = np.random.default_rng(0)
    truth = mean(prompts(rng, 100_000).sum(axis=0)).item()
    repetitions, covered = 200, {0.95: 0, 0.5: 0}
    for repetition in range(repetitions):
        totals = prompts(rng, n)
        for level in covered:
            options = {"level": level, "num_resamples": 400, "seed": repetition}
            (estimate,) = bootstrap(totals, mean, **options)
            covered[level] += estimate.covers(truth)
    # Four standard errors of the count, and 2 % of bias that ratios of few clusters have.
    for level, count in covered.items():
        error = math.sqrt(level * (1 - level) / repetitions)
        assert abs(count / repetitions - level) < 4 * error + 0.02, (level, count)


def test_an_interval_of_the_mean_of_few_clusters_is_students():
    values = stats.norm.ppf((np.arange(8) + 0.5) / 8)
    (found,) = bootstrap(np.stack([values, np.ones(8)], axis=-1), mean)
    student = stats.ttest_1samp(values, 0).confidence_interval()
    assert (found.low, found.high) == pytest.approx(tuple(student), rel=0.1)


@pytest.mark.parametrize("n", [8, 16, 200])
def test_the_ends_of_an_interval_hardly_depend_on_the_seed(n):
    totals = prompts(np.random.default_rng(3), n)
    ends = [bootstrap(totals, mean, seed=seed)[0] for seed in range(12)]
    width = ends[0].high - ends[0].low
    assert max(np.std([e.low for e in ends]), np.std([e.high for e in ends])) < 0.012 * width
    rough = [bootstrap(totals, mean, seed=seed, num_resamples=500)[0] for seed in range(12)]
    assert max(np.std([e.low for e in rough]), np.std([e.high for e in rough])) > 0.012 * width


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_holms_p_values_are_those_of_the_closed_test(p):
    """By Bonferroni: the largest over all families of hypotheses that this one belongs to."""
    families = [f for n in range(len(p)) for f in itertools.combinations(range(len(p)), n + 1)]
    found = [min(1.0, len(family) * min(p[j] for j in family)) for family in families]
    pairs = list(zip(families, found, strict=True))
    closed = [max(each for family, each in pairs if i in family) for i in range(len(p))]
    assert holm(p) == pytest.approx(closed)


def equal_cells(rng, n: int, c: int, spread) -> np.ndarray:
    """`[n, c, 2]`: cells that accept equally well, on prompts of unequal ease and length."""
    ease, steps = rng.beta(4, 3, (n, 1)), rng.integers(10, 60, (n, 1)) * np.ones((n, c))
    return np.stack([steps * (ease + rng.normal(0, 1, (n, c)) * spread), steps], axis=-1)


@pytest.mark.parametrize("n", [6, 8, 16, 40])
@pytest.mark.parametrize("spread", [0.1, np.linspace(0.02, 0.3, 12)], ids=["alike", "unlike"])
def test_differences_of_equal_cells_are_judged_at_their_level_together(n, spread):
    """Twelve equal cells: in at most 5 % of studies any two are said to differ, which each pair by
    itself does in most. 40 of 500 would be 3 standard errors above the level.
    """
    rng, pairs = np.random.default_rng(n), np.triu_indices(12, 1)
    found = [paired_p_values(equal_cells(rng, n, 12, spread))[pairs] for _ in range(500)]
    assert sum(holm(p).min() <= 0.05 for p in found) < 40
    assert sum(p.min() <= 0.05 for p in found) > 150  # the negative control
    each = np.mean([(p <= 0.05).mean() for p in found])  # pair by pair the level is kept, too
    assert each < 0.06
    assert each > 0.015


def test_two_ratios_are_compared_as_scipy_compares_means():
    """Where all clusters weigh the same, ratios are means, and scipy's paired t test is theirs."""
    values = np.random.default_rng(5).normal(size=(9, 3))
    found = paired_p_values(np.stack([7 * values, np.full((9, 3), 7.0)], axis=-1))
    for i, j in ((0, 1), (1, 2), (2, 0)):
        assert found[i, j] == pytest.approx(stats.ttest_rel(values[:, i], values[:, j]).pvalue)


def test_what_cannot_be_told_apart_is_certain_and_what_differs_everywhere_is_not():
    totals = np.array([[[a, 4.0], [a, 4.0], [a + 1, 4.0], [0.0, 0.0]] for a in range(1, 9)])
    found = paired_p_values(totals)
    assert found[0, 1] == 1.0  # equal in every cluster
    assert found[0, 2] == 0.0  # by one in every cluster
    assert (found[3] == 1.0).all()  # nothing to divide by
    assert (paired_p_values(totals[: MIN_CLUSTERS - 1]) == 1.0).all()


def test_steps_of_one_prompt_are_no_independent_data():
    rng = np.random.default_rng(1)
    (by_prompt,) = bootstrap(prompts(rng, 30), mean)
    totals = prompts(np.random.default_rng(1), 30)
    steps = [[a / s, 1.0] for a, s in totals for _ in range(int(s))]
    (by_step,) = bootstrap(np.array(steps), mean)
    assert by_step.value == pytest.approx(by_prompt.value)
    assert by_step.high - by_step.low < 0.5 * (by_prompt.high - by_prompt.low)


def test_an_interval_depends_on_the_data_and_the_seed_alone_and_few_clusters_get_none():
    totals = prompts(np.random.default_rng(2), 12)
    assert bootstrap(totals, mean) == bootstrap(totals, mean)
    assert bootstrap(totals, mean) != bootstrap(totals, mean, seed=1)
    (few,) = bootstrap(totals[: MIN_CLUSTERS - 1], mean)
    assert math.isnan(few.low)
    assert math.isnan(few.high)
    assert str(few) == f"{few}" == f"{few.value:.2f} (no interval: 5 clusters)"
    assert f"{few:.2f}" == f"{few.value:.2f}"  # a cell of a table, which has a note below it


def test_a_statistic_without_data_is_nan_and_does_not_spoil_the_others():
    totals = np.array([[1.0, 2.0, 0.0, 0.0]] * 8)

    def both(sums):
        with np.errstate(invalid="ignore"):
            return np.stack([sums[..., 0] / sums[..., 1], sums[..., 2] / sums[..., 3]], axis=-1)

    known, unknown = bootstrap(totals, both)
    assert known.value == known.low == known.high == 0.5
    assert math.isnan(unknown.value)
    assert math.isnan(unknown.low)
