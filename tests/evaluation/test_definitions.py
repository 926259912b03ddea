"""Every number on verdicts made by hand, where it can be counted on paper, here and in the words of
other projects.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.evaluation import (
    EvaluatedBatch,
    EvaluatedRow,
    Evaluation,
    as_sglang,
    as_spec_bench,
    as_specforge,
    as_vllm,
)
from specdec.results import RowStep

K = 3
BY_HAND = [
    [  # accepted 3 of 3, 0 of 3, 2 of 3 but cut after one token: 4 + 1 + 1 emitted
        RowStep([1, 2, 3], 3, [1, 2, 3, 4]),
        RowStep([5, 6, 7], 0, [9]),
        RowStep([1, 2, 3], 2, [1]),
    ],
    [  # nothing drafted, then 1 of 2
        RowStep([], 0, [8]),
        RowStep([5, 6], 1, [5, 7]),
    ],
]


def evaluation_of(rows, seconds=2.0, category="", copies: int = 1) -> Evaluation:
    """An evaluation of these rows, each of a prompt and a batch of its own."""
    batches = []
    for index in range(len(rows) * copies):
        row = EvaluatedRow(
            str(index), category, 0, 0, 5, False, "length", None, rows[index % len(rows)]
        )
        batches.append(EvaluatedBatch(index, [seconds], [row]))
    return Evaluation(batches, K)


def test_the_numbers_of_five_steps_are_those_counted_on_paper():
    values = {name: e.value for name, e in evaluation_of(BY_HAND).estimates.items()}
    assert values == pytest.approx(
        {
            "acceptance_length": 1 + 6 / 5,
            "acceptance_rate": 6 / 11,
            "block_efficiency": 9 / 5,
            "conditional_rate_1": 3 / 4,  # of the four steps that drafted
            "conditional_rate_2": 2 / 3,
            "conditional_rate_3": 1 / 2,
            "joint_rate_1": 3 / 5,
            "joint_rate_2": 2 / 5,
            "joint_rate_3": 1 / 5,
            "tokens_per_second": 9 / 4,
        }
    )


def test_the_same_steps_in_the_words_of_other_projects():
    vllm = as_vllm(BY_HAND, K)
    assert vllm["mean_acceptance_length"] == pytest.approx(1 + 6 / 4)  # drafts only
    assert vllm["avg_draft_acceptance_rate"] == pytest.approx(6 / 11)
    assert vllm["per_position_acceptance_rate"] == pytest.approx([3 / 4, 2 / 4, 1 / 4])
    assert (vllm["num_drafts"], vllm["num_draft_tokens"], vllm["num_accepted_tokens"]) == (4, 11, 6)
    sglang = as_sglang(BY_HAND)
    assert sglang["spec_accept_length"] == pytest.approx(9 / 5)
    assert sglang["spec_accept_rate"] == pytest.approx(6 / 11)
    assert (sglang["spec_verify_ct"], sglang["completion_tokens"]) == (5, 9)
    assert as_specforge(BY_HAND)["accept_length"] == pytest.approx(9 / 5)
    spec_bench = as_spec_bench(BY_HAND, [1.0, 3.0])
    assert spec_bench["mean_accepted_tokens"] == pytest.approx((4 + 1 + 3 + 1 + 2) / 5)
    assert spec_bench["tokens_per_second"] == pytest.approx((6 / 1 + 3 / 3) / 2)


@st.composite
def steps(draw):
    drafted = draw(st.integers(0, K))
    accepted = draw(st.integers(0, drafted))
    kept = draw(st.integers(1, accepted + 1))
    return RowStep([1] * drafted, accepted, [1] * kept)


@given(st.lists(st.lists(steps(), min_size=1, max_size=6), min_size=1, max_size=5))
def test_identities_between_the_numbers(rows):
    evaluation = evaluation_of(rows)
    values = {name: e.value for name, e in evaluation.estimates.items()}
    joint = [values[f"joint_rate_{i + 1}"] for i in range(K)]
    assert 1 + sum(joint) == pytest.approx(values["acceptance_length"])
    assert joint == sorted(joint, reverse=True)
    assert values["block_efficiency"] <= values["acceptance_length"] + 1e-12
    assert values["acceptance_length"] == pytest.approx(evaluation.stats.acceptance_length)
    assert as_specforge(rows)["accept_length"] == pytest.approx(values["block_efficiency"])
    assert as_spec_bench(rows)["mean_accepted_tokens"] == pytest.approx(values["acceptance_length"])
    if all(len(step.draft_tokens) == K for row in rows for step in row):
        conditional = [values[f"conditional_rate_{i + 1}"] for i in range(K)]
        product = 1.0
        for rate, expected in zip(conditional, joint, strict=True):
            product = 0.0 if math.isnan(rate) else product * rate
            assert product == pytest.approx(expected)
        vllm = as_vllm(rows, K)
        assert vllm["mean_acceptance_length"] == pytest.approx(values["acceptance_length"])
        assert vllm["per_position_acceptance_rate"] == pytest.approx(joint)


def test_both_turns_of_a_prompt_are_one_cluster():
    rows = [[RowStep([1, 2, 3], n % 4, [1] * (n % 4 + 1))] for n in range(12)]

    def of_ids(ids) -> Evaluation:
        evaluated = [
            EvaluatedRow(str(i), "", 0, 0, 5, False, "length", None, steps)
            for i, steps in zip(ids, rows, strict=True)
        ]
        return Evaluation([EvaluatedBatch(0, [1.0], evaluated)], K)

    alone, paired = of_ids(range(12)), of_ids([n % 6 for n in range(12)])
    length = "acceptance_length"
    assert alone.estimates[length].value == paired.estimates[length].value
    assert alone.estimates[length] != paired.estimates[length]
    five = of_ids([n % 5 for n in range(12)])
    assert math.isnan(five.estimates[length].low)  # five clusters, though twelve rows
