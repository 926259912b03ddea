"""The Triton kernels of `verify` are its definition: run by Triton's interpreter, on a CPU.

`test_kernels_gpu` makes the same checks with compiled kernels.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    DTYPES,
    LARGEST_UNIFORM,
    RULES,
    SMALL,
    Case,
    assert_equal,
    assert_near,
    at_index,
    exact_case,
    few,
    interpreted,
    quiet,
    random_case,
    sample_by_kernel,
    seeds,
)

from specdec.kernels import FilterParams, filtered_probs
from specdec.kernels.verify import triton
from specdec.loop.outcome import Fault

pytestmark = [quiet, interpreted]


@pytest.mark.parametrize("rule", RULES)
@few
@given(
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    seeds,
)
def test_over_exact_tables_a_verdict_is_the_definitions(
    rule, rows, width, vocab, is_ragged, is_mixed, seed
):
    width = max(width, rule == "block")
    case = exact_case(rows, width, vocab, seed, is_ragged=is_ragged, is_mixed=is_mixed)
    assert_equal(case.by_kernel(rule, **SMALL), case.by_definition(rule))


@pytest.mark.parametrize("rule", RULES)
@few
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 50),
    st.sampled_from(DTYPES),
    st.booleans(),
    seeds,
)
def test_over_random_tables_a_verdict_is_the_definitions_up_to_a_margin(
    rule, rows, width, vocab, dtype, is_filtered, seed
):
    case = random_case(rows, width, vocab, seed, dtype=dtype, is_filtered=is_filtered)
    assert_near(case, rule, case.by_kernel(rule, **SMALL))


@pytest.mark.parametrize("rule", RULES)
def test_over_a_wide_vocabulary_hardly_a_row_is_beside_a_boundary(rule):
    case = random_case(3, 2, 3001, seed=5, dtype=torch.bfloat16, is_filtered=False)
    assert assert_near(case, rule, case.by_kernel(rule, block=512, num_warps=4)) == 0


@pytest.mark.parametrize("rule", RULES)
def test_no_token_of_probability_zero_is_emitted_at_the_ends_of_the_uniforms(rule):
    case = exact_case(3, 2, 24, seed=3, is_ragged=False, is_mixed=True)
    for u in (0.0, 2.0**-52, LARGEST_UNIFORM):
        case.accept.fill_(u)
        case.resample.fill_(u)
        tokens, _ = case.by_kernel(rule, **SMALL)
        probs = filtered_probs(case.logits, case.params).gather(2, tokens.clamp(min=0)[..., None])
        assert bool((probs[..., 0][tokens >= 0] > 0).all())


@pytest.mark.parametrize(("rule", "u"), [("token", 0.0), ("block", LARGEST_UNIFORM)])
def test_a_rejection_that_leaves_nothing_draws_from_the_target(rule, u):
    case = random_case(3, 1, 24, seed=2, dtype=torch.float32, is_filtered=True)
    uniforms = torch.full((3,), u, dtype=torch.float64)
    first = case.logits[:, 0], at_index(case.params, 0)
    expected, probs = sample_by_kernel(*first, uniforms, **SMALL)
    case.draft_probs = probs[:, None] * (1 + 2.0**-20)  # agrees up to rounding, nowhere below
    case.draft_tokens = probs.argmax(-1, keepdim=True)
    case.accept, case.resample = torch.full((3, 1), LARGEST_UNIFORM).double(), uniforms
    tokens, count = case.by_kernel(rule, **SMALL)
    assert count.tolist() == [0] * 3
    assert torch.equal(tokens[:, 0], expected)


@pytest.mark.parametrize("rule", RULES)
def test_what_is_wrong_with_the_inputs_is_found_where_it_matters(rule):
    def broken_by(edit) -> list:
        """Counts and faults of a case that an edit breaks."""
        broken = random_case(3, 2, 30, seed=11, dtype=torch.float32, is_filtered=False)
        edit(broken)
        broken.accept = torch.full((3, 2), LARGEST_UNIFORM, dtype=torch.float64)
        broken.accept[:, 0] = 0.0
        found = broken.by_kernel(rule, **SMALL)
        assert torch.equal(found[1], broken.by_definition(rule)[1])
        faults = broken.faults(rule, found)
        assert faults == broken.faults(rule, broken.by_definition(rule))
        return [found[1].tolist(), faults]

    counts, faults = broken_by(lambda case: None)
    assert faults == [0] * 3
    _, faults = broken_by(lambda case: case.logits[:, 0, 3].fill_(torch.nan))
    assert faults == [Fault.TARGET_LOGITS] * 3
    _, faults = broken_by(lambda case: case.logits[:, 2, 3].fill_(torch.inf))
    assert faults == [Fault.TARGET_LOGITS * (n == 2) for n in counts]  # else nobody reads it
    if rule == "point":
        return

    def has_a_negative_entry(case: Case) -> None:
        case.draft_probs[..., 5] -= 0.5  # the sum stays 1
        case.draft_probs[..., 29] += 0.5

    def has_impossible_tokens(case: Case) -> None:
        case.draft_probs.scatter_(2, case.draft_tokens[..., None], 0.0)
        case.draft_probs /= case.draft_probs.sum(-1, keepdim=True)

    for edit in (lambda case: case.draft_probs.mul_(1.01), has_a_negative_entry):
        _, faults = broken_by(edit)
        assert all(fault & Fault.DRAFT_PROBS for fault in faults)
    assert broken_by(has_impossible_tokens)[1] == [Fault.DRAFT_TOKEN] * 3


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("index", "rule"), [(0, "point"), (1, "token"), (2, "block")])
def test_a_greedy_row_without_a_distribution_is_found_after_an_accepted_token(rule, index, value):
    logits = torch.zeros(2, 3, 8)
    logits[..., 0], logits[:, index, 3] = 5.0, value
    tokens = torch.zeros(2, 2, dtype=torch.long)
    tokens[:, index:].fill_(3)  # the definition accepts it in the greedy row
    probs = torch.zeros(2, 2, 8).scatter_(2, tokens[..., None], 1.0)
    params = FilterParams(None, torch.tensor([True, False]))
    draws = torch.full((2, 2), 0.5, dtype=torch.float64), torch.full((2,), 0.5, dtype=torch.float64)
    case = Case(tokens, probs, None, logits, params, *draws)
    faults = case.faults(rule, case.by_kernel(rule, block=4, num_warps=1))
    assert faults[0] == Fault.TARGET_LOGITS
    assert faults == case.faults(rule, case.by_definition(rule))


@pytest.mark.parametrize("rule", RULES)
def test_no_rows_have_verdicts_of_no_rows_for_which_nothing_is_launched(rule, monkeypatch):
    monkeypatch.delattr(triton, "_launch")
    case = random_case(0, 3, 40, 1, dtype=torch.float32, is_filtered=False)
    assert_equal(case.by_kernel(rule, **SMALL), case.by_definition(rule))


def test_logits_that_are_nan_give_faults_and_tokens_of_the_vocabulary():
    logits = torch.full((2, 3, 40), torch.nan)
    case = exact_case(2, 2, 40, seed=0, is_ragged=False, is_mixed=False)
    case.logits, case.params = logits, FilterParams(None, torch.tensor([True, False]))
    for rule in RULES:
        tokens, count = case.by_kernel(rule, **SMALL)
        assert bool(((tokens >= -1) & (tokens < 40)).all())
        assert bool((tokens[:, 0] >= 0).all())
        assert all(fault & Fault.TARGET_LOGITS for fault in case.faults(rule, (tokens, count)))
