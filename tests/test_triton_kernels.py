"""The Triton kernels are their definitions: run by Triton's interpreter, on a CPU.

Chunks are as small as 16 tokens, so that rows of a few dozen tokens have many chunks and a ragged
last one. `test_gpu_kernels` makes the same checks with compiled kernels.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is there on Linux only")

import triton
import triton.language as tl
from kernel_cases import (
    DTYPES,
    LARGEST_UNIFORM,
    RULES,
    Case,
    assert_equal,
    assert_near,
    assert_race_near,
    assert_sample_near,
    exact_case,
    random_case,
    random_gate,
    random_logits,
)

from specdec.kernels import gate as gates
from specdec.kernels import triton_race, triton_sample, triton_verify
from specdec.kernels.gate import Gate
from specdec.kernels.philox import philox, to_uniforms
from specdec.kernels.triton_philox import token_uniforms
from specdec.types import Fault

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, at 0 / 0 and the like
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="here kernels are compiled; see test_gpu_kernels"
    ),
]
SMALL = {"block": 16, "num_warps": 2}
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=6)


@pytest.mark.parametrize("rule", RULES)
@few
@given(
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    seeds,
)
def test_over_exact_tables_a_verdict_is_the_definitions(
    rule, rows, width, vocab, is_ragged, is_mixed, lag, span, seed
):
    width = max(width, rule == "block")
    case = exact_case(rows, width, vocab, seed, is_ragged=is_ragged, is_mixed=is_mixed)
    assert_equal(case.decided(rule, **SMALL, lag=lag, span=span), case.defined(rule))


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
    rule, rows, width, vocab, dtype, is_gated, seed
):
    case = random_case(rows, width, vocab, seed, dtype=dtype, is_gated=is_gated)
    assert_near(case, rule, case.decided(rule, **SMALL))


@pytest.mark.parametrize("rule", RULES)
def test_over_a_wide_vocabulary_hardly_a_row_is_beside_a_boundary(rule):
    case = random_case(3, 2, 3001, seed=5, dtype=torch.bfloat16, is_gated=False)
    assert assert_near(case, rule, case.decided(rule, block=512, num_warps=4)) == 0


def one_token(p: float, q: float, u: float) -> Case:
    """K = 1, V = 2: target and draft probability of the draft token 0, and the draw."""
    laws = torch.tensor([[[p, 1 - p], [1.0, 0.0]]])
    draft = torch.tensor([[[q, 1 - q]]])
    draws = torch.tensor([[u]], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
    return Case(torch.tensor([[0]]), draft, None, laws.log(), Gate(), *draws)


@pytest.mark.parametrize("rule", RULES)
def test_a_token_is_accepted_strictly_below_its_ratio(rule):
    q = 1.0 if rule == "point" else 0.5
    for u, accepted in ((q - 2.0**-52, 1), (q, 0)):
        case = one_token(0.5 * q / 0.5 * q, q, u) if rule == "point" else one_token(0.25, 0.5, u)
        assert case.decided(rule, **SMALL)[1].item() == accepted


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("u", [0.0, 2.0**-52, LARGEST_UNIFORM])
def test_no_token_of_probability_zero_is_emitted_at_the_ends_of_the_uniforms(rule, u):
    case = exact_case(4, 3, 40, seed=3, is_ragged=False, is_mixed=True)
    case.accept.fill_(u)
    case.resample.fill_(u)
    tokens, _, _ = case.decided(rule, **SMALL)
    law = gates.law(case.logits, case.gate).gather(2, tokens.clamp(min=0)[..., None])[..., 0]
    assert bool((law[tokens >= 0] > 0).all())


@pytest.mark.parametrize("u", [0.0, 0.5, LARGEST_UNIFORM])
def test_masses_below_the_normal_floats_are_never_drawn_where_they_round_to_zero(u):
    logits = torch.full((1, 1, 64), -104.0)  # exp(-104) is 0 in float32, and 64 of them are not
    logits[0, 0, 40], logits[0, 0, 41] = 0.0, -90.0  # the latter is subnormal
    uniforms = torch.tensor([[u]], dtype=torch.float64)
    token, law = triton_sample.sample(logits, Gate(), uniforms, **SMALL)
    assert law[0, 0, token.item()] > 0
    assert token.item() == 40


@pytest.mark.parametrize("rule", ["chain", "block"])
@pytest.mark.parametrize("u", [0.0, 0.4, LARGEST_UNIFORM])
def test_a_rejection_that_leaves_nothing_draws_from_the_target(rule, u):
    case = random_case(4, 1, 50, seed=2, dtype=torch.float32, is_gated=True)
    uniforms = torch.full((4,), u, dtype=torch.float64)
    expected, law = triton_sample.sample(case.logits[:, 0], _first(case.gate), uniforms, **SMALL)
    case.draft_probs = law[:, None] * (1 + 2.0**-20)  # agrees up to rounding, nowhere below
    case.draft_tokens = law.argmax(-1, keepdim=True)
    case.accept, case.resample = torch.full((4, 1), LARGEST_UNIFORM).double(), uniforms
    tokens, count, _ = case.decided(rule, **SMALL)
    assert count.tolist() == [0] * 4
    assert torch.equal(tokens[:, 0], expected)


def _first(gate: Gate) -> Gate:
    """The gate of the first place of a window."""
    return gate._replace(floor=type(gate.floor)(*(t[:, 0] for t in gate.floor)))


@pytest.mark.parametrize("rule", RULES)
def test_what_is_wrong_with_the_inputs_is_found_where_it_matters(rule):
    def case() -> Case:
        return random_case(3, 2, 30, seed=11, dtype=torch.float32, is_gated=False)

    def decided_on(broken: Case) -> list:
        broken.accept = torch.full((3, 2), LARGEST_UNIFORM, dtype=torch.float64)
        broken.accept[:, 0] = 0.0
        _, count, faults = broken.decided(rule, **SMALL)
        assert torch.equal(count, broken.defined(rule)[1])
        expected = broken.defined(rule)[2]
        if rule == "chain":  # one law of each row is read in full, that of the rejected token
            expected = expected.where(count < 2, expected & ~int(Fault.DRAFT_PROBS))
        assert torch.equal(faults, expected)
        return [count.tolist(), faults.tolist()]

    counts, faults = decided_on(case())
    assert faults == [0] * 3
    for value in (torch.nan, torch.inf):
        broken = case()
        broken.logits[:, 0, 3] = value
        assert decided_on(broken)[1] == [Fault.TARGET_LOGITS] * 3
        broken = case()
        broken.logits[:, 2, 3] = value  # behind the last accepted token it does not matter
        assert decided_on(broken)[1] == [Fault.TARGET_LOGITS * (n == 2) for n in counts]
    if rule == "point":
        return
    broken = case()
    broken.draft_probs *= 1.01
    assert decided_on(broken)[1].count(Fault.DRAFT_PROBS) == 3 - counts.count(2) * (rule == "chain")
    broken = case()
    broken.draft_probs.scatter_(2, broken.draft_tokens[..., None], 0.0)
    broken.draft_probs /= broken.draft_probs.sum(-1, keepdim=True)
    assert decided_on(broken)[1] == [Fault.DRAFT_TOKEN] * 3


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("rule", RULES)
def test_a_greedy_row_that_is_no_law_is_found_behind_an_accepted_token_too(rule, place, value):
    logits = torch.zeros(2, 3, 8)
    logits[..., 0], logits[:, place, 3] = 5.0, value
    tokens = torch.zeros(2, 2, dtype=torch.long)
    tokens[:, place:].fill_(3)  # the definition accepts it in the greedy row
    probs = torch.zeros(2, 2, 8).scatter_(2, tokens[..., None], 1.0)
    gate = Gate(None, torch.tensor([True, False]))
    draws = torch.full((2, 2), 0.5, dtype=torch.float64), torch.full((2,), 0.5, dtype=torch.float64)
    case = Case(tokens, probs, None, logits, gate, *draws)
    _, _, faults = case.decided(rule, block=4, num_warps=1)
    assert faults[0] == Fault.TARGET_LOGITS
    assert torch.equal(faults, case.defined(rule)[2])


@pytest.mark.parametrize("rule", RULES)
def test_no_rows_have_verdicts_of_no_rows_for_which_nothing_is_launched(rule, monkeypatch):
    for launch in ("verify_by_token", "verify_by_block"):
        monkeypatch.delattr(triton_verify, launch)
    case = random_case(0, 3, 40, 1, dtype=torch.float32, is_gated=False)
    assert_equal(case.decided(rule, **SMALL), case.defined(rule))


def test_more_rows_than_a_launch_can_count_are_refused():
    with pytest.raises(ValueError, match="at most 65535 rows at a time, got 65536; split"):
        triton_sample.sample(torch.zeros(2**16, 1), Gate(), torch.zeros(2**16).double())


@few
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 70), st.sampled_from(DTYPES), seeds)
def test_a_sample_and_its_law_are_the_definitions(rows, places, vocab, dtype, seed):
    logits = random_logits(rows, places, vocab, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(rows, places, generator=generator, dtype=torch.float64)
    gate = random_gate(logits, seed) if seed % 2 else Gate()
    assert_sample_near(logits, gate, uniforms, **SMALL)
    row = random_logits(rows, vocab, seed=seed, dtype=dtype)
    assert_sample_near(row, Gate(gate.temperature, gate.is_greedy), uniforms[:, 0], **SMALL)


def test_a_greedy_row_samples_its_largest_logit_also_beside_others_and_where_it_is_infinite():
    logits = torch.tensor([[0.0, torch.inf, 1.0], [3.0, 0.0, 0.0]])
    gate = Gate(None, torch.tensor([True, False]))
    token, law = triton_sample.sample(logits, gate, torch.zeros(2).double(), **SMALL)
    assert token.tolist() == [1, 0]
    torch.testing.assert_close(law, gates.law(logits, gate), rtol=1e-6, atol=0)


@triton.jit
def _write_uniforms(key, position, stream, out, block: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    ids = chunk * block + tl.arange(0, block)
    values = token_uniforms(key, row, tl.load(position + row), stream, chunk, block)
    tl.store(out + row * tl.num_programs(1) * block + ids, values)


def test_noise_made_in_a_kernel_is_that_of_philox_to_the_bit():
    key = torch.tensor([[0, 0], [7, 2**31], [2**32 - 1, 2**32 - 1]])
    position = torch.tensor([0, 2**31, 2**32 - 1])
    out = torch.empty(3, 32, dtype=torch.float64)
    _write_uniforms[(3, 2)](key, position, 3, out, block=16)
    counter = torch.zeros(3, 16, 4, dtype=torch.long)
    counter[..., 0], counter[..., 1], counter[..., 2] = position[:, None], torch.arange(16), 3
    words = philox(counter, key[:, None])
    assert torch.equal(out, to_uniforms(words[..., 0::2], words[..., 1::2]).flatten(1))


@few
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 70), st.sampled_from(DTYPES), seeds)
def test_a_race_has_the_winner_of_the_definition(rows, places, vocab, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(rows, places, vocab, seed=seed, dtype=dtype)
    gate = random_gate(logits, seed) if seed % 2 else Gate()
    key = torch.randint(0, 2**32, (rows, 2), generator=generator)
    position = torch.randint(0, 2**32, (rows, places), generator=generator)
    assert_race_near(logits, gate, key, position, 3, **SMALL)


def test_a_race_with_another_stream_key_or_position_has_other_winners():
    logits = random_logits(2, 4, 30, seed=1, dtype=torch.float32, spread=0.5)
    key, position = torch.tensor([[1, 2]] * 2), torch.arange(8).view(2, 4)
    ours = assert_race_near(logits, Gate(), key, position, 3, **SMALL)
    for other in ((key, position, 2), (key + 1, position, 3), (key, position + 1, 3)):
        assert (triton_race.race(logits, Gate(), *other, **SMALL) != ours).sum() > 2


def test_logits_that_are_nan_give_faults_and_tokens_of_the_vocabulary():
    logits = torch.full((2, 3, 40), torch.nan)
    gate = Gate(None, torch.tensor([True, False]))
    case = exact_case(2, 2, 40, seed=0, is_ragged=False, is_mixed=False)
    case.logits, case.gate = logits, gate
    for rule in RULES:
        tokens, _, faults = case.decided(rule, **SMALL)
        assert bool(((tokens >= -1) & (tokens < 40)).all())
        assert bool((tokens[:, 0] >= 0).all())
        assert bool((faults & int(Fault.TARGET_LOGITS) > 0).all())
    key, position = torch.zeros(2, 2, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)
    tokens = triton_race.race(logits, gate, key, position, 3, **SMALL)
    assert bool(((tokens >= 0) & (tokens < 40)).all())
