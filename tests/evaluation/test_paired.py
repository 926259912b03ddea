"""Differences of two runs over the same prompts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.evaluation import EvaluatedBatch, EvaluatedRow, Evaluation, difference
from specdec.results import RowStep

counts = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=6, max_size=12)


def run(accepted, *, seconds=1.0, names=None):
    """Of a prompt for each number, one step of three draft tokens each."""
    rows = [
        EvaluatedRow(name, "", 0, 0, 4, False, "length", None, [RowStep([1] * 3, a, [5] * (a + 1))])
        for name, a in zip(names or map(str, range(len(accepted))), accepted, strict=True)
    ]
    batches = [EvaluatedBatch(i, [seconds], [row]) for i, row in enumerate(rows)]
    return Evaluation(batches, 3)


@given(counts)
def test_a_difference_is_that_of_the_estimates_and_turns_its_sign(pairs):
    first, second = (run([pair[i] for pair in pairs]) for i in range(2))
    for of in ("acceptance_length", "acceptance_rate", "block_efficiency", "tokens_per_second"):
        forth, back = difference(first, second, of), difference(second, first, of)
        expected = second.estimates[of].value - first.estimates[of].value
        assert forth.value == pytest.approx(expected)
        assert (back.value, back.low, back.high) == pytest.approx(
            (-forth.value, -forth.high, -forth.low)
        )
        assert forth.low <= forth.value + 1e-12
        assert forth.value <= forth.high + 1e-12


def test_what_prompts_have_in_common_leaves_the_interval():
    """One more accepted for each prompt: exactly 1, whatever the prompts are."""
    generator = np.random.default_rng(0)
    accepted = generator.integers(0, 3, 40).tolist()
    first, second = run(accepted), run([a + 1 for a in accepted])
    found = difference(first, second)
    assert (found.low, found.value, found.high) == pytest.approx((1, 1, 1))
    assert first.estimates["acceptance_length"].high - found.value > 0.5
    # The negative control: with the prompts mixed up the interval is as wide as the prompts differ.
    other = run([accepted[i - 7] + 1 for i in range(40)])
    loose = difference(first, other)
    assert loose.high - loose.low > 0.4


def test_intervals_cover_the_truth_as_often_as_they_say():
    generator, covered, rounds = np.random.default_rng(1), 0, 300
    for _ in range(rounds):
        ease = generator.uniform(0.1, 0.8, 25)
        first, second = (generator.binomial(3, ease + shift) for shift in (0, 0.1))
        covered += difference(run(first.tolist()), run(second.tolist())).covers(0.3)
    assert 0.91 <= covered / rounds <= 0.99  # 0.95 within 3.2 standard errors


def test_runs_over_other_prompts_are_refused():
    first, second = run([1, 2]), run([1, 2], names=["0", "other"])
    with pytest.raises(ValueError, match="over other prompts: 2 are in one of them only, '1'"):
        difference(first, second)
    with pytest.raises(ValueError, match="over other batches"):
        difference(first, second, "tokens_per_second")
    with pytest.raises(ValueError, match="of must be 'acceptance_length'"):
        difference(first, first, "speed")
