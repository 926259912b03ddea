"""The compiled Triton kernels are their definitions: `python -m pytest -m gpu`.

The checks are those of `test_triton_kernels`, over more shapes and with the sizes that the library
uses, through `specdec.kernels`; and tables may have more than 2**31 entries.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux only")

from kernel_cases import (
    DTYPES,
    LARGEST_UNIFORM,
    RULES,
    VOCAB,
    Case,
    assert_equal,
    assert_floor_near,
    assert_near,
    assert_race_near,
    assert_sample_near,
    decided,
    exact_case,
    on_gpu,
    random_case,
    random_gate,
    random_logits,
    random_truncation,
)

from specdec.kernels import find_floor, race, sample
from specdec.kernels import gate as gates
from specdec.kernels.gate import Gate, Truncation

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_over_exact_tables_a_verdict_is_the_definitions(rule, is_mixed):
    for seed in range(4):
        for width, vocab in ((3, 37), (3, 5000)):
            case = exact_case(9, width, vocab, seed, is_ragged=is_mixed, is_mixed=is_mixed).cuda()
            assert_equal(decided(case, rule), case.defined(rule))


@pytest.mark.parametrize("width", [0, 1])
@pytest.mark.parametrize("rule", RULES)
def test_the_smallest_sizes_are_decided_as_the_definition_does(rule, width):
    for vocab in (1, 2):
        case = exact_case(2, max(width, rule == "block"), vocab, 1, is_ragged=False, is_mixed=False)
        assert_equal(decided(case.cuda(), rule), case.cuda().defined(rule))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_over_random_tables_a_verdict_is_the_definitions_up_to_a_margin(rule, dtype):
    for vocab, is_gated in ((9001, True), (VOCAB, False)):
        differing = 0
        for seed in range(3):
            case = random_case(8, 5, vocab, seed, dtype=dtype, is_gated=is_gated).cuda()
            differing += assert_near(case, rule, decided(case, rule))
        assert differing <= 6  # of 24 rows; the laws are flat, so boundaries are everywhere


@pytest.mark.parametrize("rule", ["chain", "block"])
@pytest.mark.parametrize("span", [1, 2, 4])
def test_a_verdict_is_the_same_however_many_chunks_a_program_takes(rule, span):
    case = random_case(8, 5, VOCAB, 5, dtype=torch.bfloat16, is_gated=False).cuda()
    assert_equal(case.decided(rule, span=span), decided(case, rule))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("u", [0.0, 2.0**-52, LARGEST_UNIFORM])
def test_no_token_of_probability_zero_is_emitted_at_the_ends_of_the_uniforms(rule, u):
    case = exact_case(9, 3, 5000, seed=3, is_ragged=False, is_mixed=True).cuda()
    case.accept.fill_(u)
    case.resample.fill_(u)
    tokens, _, _ = decided(case, rule)
    law = gates.law(case.logits, case.gate).gather(2, tokens.clamp(min=0)[..., None])[..., 0]
    assert bool((law[tokens >= 0] > 0).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [9001, VOCAB])
def test_a_sample_and_its_law_are_the_definitions(dtype, vocab):
    logits = random_logits(3, 4, vocab, seed=vocab, dtype=dtype)
    gate, logits = on_gpu(random_gate(logits, 1)), logits.cuda()
    uniforms = torch.rand(3, 4, dtype=torch.float64, device="cuda")
    assert_sample_near(logits, gate, uniforms)
    assert_sample_near(logits[:, 1], Gate(gate.temperature), uniforms[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_race_has_the_winner_of_the_definition_and_of_the_cpu(dtype):
    logits = random_logits(3, 4, 9001, seed=1, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    key = torch.randint(0, 2**32, (3, 2), generator=generator)
    position = torch.randint(0, 2**32, (3, 4), generator=generator)
    for gate in (Gate(), random_gate(logits, 1)):
        draws = key.cuda(), position.cuda(), 3
        tokens = assert_race_near(logits.cuda(), on_gpu(gate), *draws)
        assert torch.equal(tokens.cpu(), race(logits, gate, key, position, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [9001, VOCAB])
def test_a_floor_keeps_what_the_definitions_keeps(dtype, vocab):
    logits = random_logits(8, 2, vocab, seed=vocab, dtype=dtype).cuda()
    temperature = torch.linspace(0.4, 2.0, 8, dtype=torch.float64, device="cuda")
    truncation = on_gpu(random_truncation(8, 1)[:3])
    assert_floor_near(logits, temperature, Truncation(*truncation, 60))
    for alone in range(3):
        kept = [value if i == alone else None for i, value in enumerate(truncation)]
        assert_floor_near(logits, None, Truncation(*kept, 60))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_floor_among_more_tokens_than_are_listed_is_the_definitions(dtype):
    """Masses of equal logits, and their sums, are exact."""
    logits = torch.zeros(4, 2**16, dtype=dtype, device="cuda")
    logits[1, ::2], logits[2, 1::4] = -torch.inf, -torch.inf
    logits[3] = torch.randn(2**16, device="cuda") / 100
    tail = torch.tensor([0.25, 0.5, -1.0, 0.3], dtype=torch.float64, device="cuda")
    assert_floor_near(logits[3:], None, Truncation(None, tail[3:]))
    for top_k in (0, 20000):
        truncation = Truncation(torch.full((4,), top_k, device="cuda"), tail, None, top_k or 1)
        floors = find_floor(logits, None, truncation), gates.find_floor(logits, None, truncation)
        kept = [gates.is_kept(logits, f)[:3] & (logits[:3] > -torch.inf) for f in floors]
        assert torch.equal(*kept)


@pytest.mark.parametrize("rule", RULES)
def test_tables_of_more_than_2_31_entries_are_read_where_they_are(rule):
    rows, vocab = 4200, 2**18
    logits = torch.full((rows, 2, vocab), -5.0, dtype=torch.bfloat16, device="cuda")
    probs = torch.zeros(rows, 1, vocab, device="cuda")
    assert logits.numel() > 2**31
    ids = torch.arange(rows, device="cuda") * 61 % vocab
    logits[torch.arange(rows), 0, ids] = 30.0
    logits[torch.arange(rows), 1, ids + 1] = 30.0
    probs[torch.arange(rows), 0, ids] = 1.0
    draws = torch.full((rows, 1), 0.5, dtype=torch.float64, device="cuda")
    case = Case(ids[:, None], probs, None, logits, Gate(), draws, draws[:, 0])
    tokens, count, faults = decided(case, rule)
    assert bool((count == 1).all())
    assert bool((faults == 0).all())
    assert torch.equal(tokens, torch.stack([ids, ids + 1], 1))
    if rule == "point":
        drawn, law = sample(logits[2100:], Gate(), draws[2100:].expand(-1, 2))
        assert torch.equal(drawn, tokens[2100:])
        assert bool((law.gather(-1, drawn[..., None]) > 0.99).all())
