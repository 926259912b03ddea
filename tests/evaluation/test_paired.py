"""Differences of two runs over the same prompts."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.lab.evaluation import Evaluation, Study, difference
from specdec.lab.evaluation.paired import p_values, quotient
from specdec.lab.evaluation.run_file import EvaluatedBatch, EvaluatedRow
from specdec.row_step import RowStep

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


def test_what_is_printed_of_two_runs_says_which_is_first():
    many, few = run([2] * 6), run([1] * 6)
    assert str(difference(few, many)) == "1.00 [1.00, 1.00] (second minus first)"
    assert f"{difference(few, many):.1f}" == "1.0 [1.0, 1.0]"
    assert str(quotient(few, many)).endswith("] (second over first)")
    words = str(difference(run([1] * 2), run([2] * 2)))
    assert words.startswith("1.00 (second minus first; no interval")


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


def sampled(rng, *, samples=3, size=1, speed=1.0, prompts=7):
    """A timed run of several samples of each prompt, in batches of `size` rows."""
    keys = [(f"p{i}", s) for i in range(prompts) for s in range(samples)]
    rows = [
        EvaluatedRow(p, "", 0, s, 4, False, "length", s, [RowStep([1], a, [5] * (a + 1))])
        for (p, s), a in zip(keys, rng.integers(0, 2, len(keys)).tolist(), strict=True)
    ]
    groups = [rows[i : i + size] for i in range(0, len(rows), size)]
    seconds = rng.lognormal(0, 0.3, len(groups)) / speed
    batches = [
        EvaluatedBatch(i, [float(s)], group)
        for i, (s, group) in enumerate(zip(seconds, groups, strict=True))
    ]
    return Evaluation(batches, 1)


@pytest.mark.parametrize(("samples", "size", "separate"), [(1, 1, 7), (3, 1, 7), (3, 3, 7)])
def test_every_batch_counts_once_in_a_speed(samples, size, separate):
    """Samples of one prompt are batches of their own at batch size 1, and one cluster."""
    rng = np.random.default_rng(0)
    first, second = (sampled(rng, samples=samples, size=size, speed=s) for s in (1, 1.2))
    for of in ("tokens_per_second", "ms_per_token"):
        values = [run.estimates[of].value for run in (first, second)]
        assert quotient(first, second, of).value == pytest.approx(values[1] / values[0])
        assert difference(first, second, of).value == pytest.approx(values[1] - values[0])
        assert quotient(first, second, of).has_interval
    assert len(first.separate_batches) == separate
    assert sum(map(len, first.separate_batches)) == len(first.batches)


def test_batches_with_prompts_in_common_are_one_cluster():
    rng = np.random.default_rng(0)
    run = sampled(rng, samples=3, size=2)  # (a a) (a b) (b b) (c c) (c d) ...
    counts = [len({row.prompt for b in group for row in b.rows}) for group in run.separate_batches]
    assert counts == [2, 2, 2, 1]
    assert str(run.estimates["ms_per_token"]).endswith("(no interval: 4 separate batches)")


def test_copies_of_a_batch_add_nothing_to_what_is_known_of_speed():
    """Samples that are alike: as batches of their own they would narrow the interval by half."""
    once = sampled(np.random.default_rng(0), samples=1, prompts=12)
    copies = [
        EvaluatedBatch(i, b.seconds, [dataclasses.replace(b.rows[0], sample=s)])
        for i, (s, b) in enumerate((s, b) for s in range(4) for b in once.batches)
    ]
    many = Evaluation(copies, 1)
    for of in ("tokens_per_second", "ms_per_token"):
        assert many.estimates[of].low == pytest.approx(once.estimates[of].low)
        assert many.estimates[of].high == pytest.approx(once.estimates[of].high)


def test_a_row_that_comes_twice_is_refused():
    batches = run([1, 2]).batches
    with pytest.raises(ValueError, match="1 rows come twice, turn 0 of sample 0 of prompt '0'"):
        Evaluation([*batches, batches[0]], 3)


def test_what_a_run_does_not_know_is_not_compared():
    """The acceptance of HF's assisted decoding, which shows tokens only."""
    known = run([1, 2, 3] * 3)
    steps = {"steps": [RowStep([], 0, [5]), RowStep([], 0, [6])]}
    batches = [
        EvaluatedBatch(b.index, [1.0], [dataclasses.replace(b.rows[0], **steps)])
        for b in known.batches
    ]
    unknown = Evaluation(batches, None)
    for contrast in (difference, quotient):
        for pair in ((known, unknown), (unknown, known)):
            assert math.isnan(contrast(*pair, "acceptance_length").value)
            assert not math.isnan(contrast(*pair, "tokens_per_second").value)
    assert p_values([known, unknown], "block_efficiency").tolist() == [[1, 1], [1, 1]]
    assert p_values([known, unknown], "tokens_per_second")[0, 1] < 1
    cells = [{"drafter": n, "draft": 3, "temperature": 0.0} for n in ("HF", "ours")]
    best = Study(cells, [unknown, known]).best("acceptance_length")
    assert [cell["drafter"] for cell in best.cells] == ["ours", "HF"]


def test_runs_over_other_prompts_are_refused():
    first, second = run([1, 2]), run([1, 2], names=["0", "other"])
    with pytest.raises(ValueError, match="over other prompts: 2 are in one of them only, '1'"):
        difference(first, second)
    with pytest.raises(ValueError, match="over other batches"):
        difference(first, second, "tokens_per_second")
    with pytest.raises(ValueError, match="of must be 'acceptance_length'"):
        difference(first, first, "speed")
