"""The compiled Triton kernels are their definitions: `python -m pytest -m gpu`.

The checks are those that Triton's interpreter makes in the other files of this folder, over more
shapes and with the sizes that the library uses, through `specdec.kernels`. Tables may have more
than 2**31 entries. No operation waits for the host, and each is one CUDA graph.
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
    assert_cutoff_near,
    assert_equal,
    assert_near,
    assert_race_near,
    assert_sample_near,
    by_definition,
    by_library,
    exact_case,
    graph_of,
    launches_of,
    on_gpu,
    random_case,
    random_logits,
    random_params,
    random_truncation,
)

from specdec.kernels import FilterParams, filtered_probs, race, sample
from specdec.kernels.sample.reference import sample_tokens
from specdec.kernels.truncate.reference import find_cutoff, is_kept
from specdec.kernels.types import Truncation
from specdec.samplers import Noise, Stream

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_over_exact_tables_a_verdict_is_the_definitions(rule, is_mixed):
    for seed in range(4):
        for width, vocab in ((3, 37), (3, 5000)):
            case = exact_case(9, width, vocab, seed, is_ragged=is_mixed, is_mixed=is_mixed).cuda()
            assert_equal(by_library(case, rule), case.by_definition(rule))


@pytest.mark.parametrize("width", [0, 1])
@pytest.mark.parametrize("rule", RULES)
def test_the_smallest_sizes_are_decided_as_the_definition_does(rule, width):
    for vocab in (1, 2):
        case = exact_case(2, max(width, rule == "block"), vocab, 1, is_ragged=False, is_mixed=False)
        assert_equal(by_library(case.cuda(), rule), case.cuda().by_definition(rule))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_over_random_tables_a_verdict_is_the_definitions_up_to_a_margin(rule, dtype):
    for vocab, is_filtered in ((9001, True), (VOCAB, False)):
        differing = 0
        for seed in range(3):
            case = random_case(8, 5, vocab, seed, dtype=dtype, is_filtered=is_filtered).cuda()
            differing += assert_near(case, rule, by_library(case, rule))
        assert differing <= 6  # of 24 rows; the laws are flat, so boundaries are everywhere


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("u", [0.0, 2.0**-52, LARGEST_UNIFORM])
def test_no_token_of_probability_zero_is_emitted_at_the_ends_of_the_uniforms(rule, u):
    case = exact_case(9, 3, 5000, seed=3, is_ragged=False, is_mixed=True).cuda()
    case.accept.fill_(u)
    case.resample.fill_(u)
    tokens, _ = by_library(case, rule)
    probs = filtered_probs(case.logits, case.params).gather(2, tokens.clamp(min=0)[..., None])
    assert bool((probs[..., 0][tokens >= 0] > 0).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [9001, VOCAB])
def test_a_sample_and_its_probabilities_are_the_definitions(dtype, vocab):
    logits = random_logits(3, 4, vocab, seed=vocab, dtype=dtype)
    params, logits = on_gpu(random_params(logits, 1)), logits.cuda()
    uniforms = torch.rand(3, 4, dtype=torch.float64, device="cuda")
    assert_sample_near(logits, params, uniforms)
    assert_sample_near(logits[:, 1], FilterParams(params.temperature), uniforms[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_race_has_the_winner_of_the_definition_and_of_the_cpu(dtype):
    logits = random_logits(3, 4, 9001, seed=1, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    key = torch.randint(0, 2**32, (3, 2), generator=generator)
    position = torch.randint(0, 2**32, (3, 4), generator=generator)
    for params in (FilterParams(), random_params(logits, 1)):
        noise = key.cuda(), position.cuda(), 3
        tokens = assert_race_near(logits.cuda(), on_gpu(params), *noise)
        assert torch.equal(tokens.cpu(), race(logits, params, key, position, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [9001, VOCAB])
def test_a_cutoff_keeps_what_the_definitions_keeps(dtype, vocab):
    logits = random_logits(8, 2, vocab, seed=vocab, dtype=dtype).cuda()
    temperature = torch.linspace(0.4, 2.0, 8, dtype=torch.float64, device="cuda")
    truncation = on_gpu(random_truncation(8, 1)[:3])
    assert_cutoff_near(logits, temperature, Truncation(*truncation, 60))
    for alone in range(3):
        kept = [value if i == alone else None for i, value in enumerate(truncation)]
        assert_cutoff_near(logits, None, Truncation(*kept, 60))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cutoff_among_equal_logits_is_the_definitions(dtype):
    """Masses of equal logits, and their sums, are exact. With top-k more tokens are kept than can
    be listed.
    """
    logits = torch.zeros(4, 2**16, dtype=dtype, device="cuda")
    logits[1, ::2], logits[2, 1::4] = -torch.inf, -torch.inf
    logits[3] = torch.randn(2**16, device="cuda") / 100
    top_p = torch.tensor([0.75, 0.5, 1.0, 0.7], dtype=torch.float64, device="cuda")
    assert_cutoff_near(logits[3:], None, Truncation(None, top_p[3:]))
    for top_k in (0, 20000):
        truncation = Truncation(torch.full((4,), top_k, device="cuda"), top_p, None, top_k or 1)
        ours = find_cutoff(logits, None, truncation)
        cutoffs = ours, by_definition(find_cutoff, logits, None, truncation)
        kept = [is_kept(logits, cutoff)[:3] & (logits[:3] > -torch.inf) for cutoff in cutoffs]
        assert torch.equal(*kept)


def test_noise_is_the_same_bits_on_every_device():
    start = torch.tensor([3, 2**31])
    here = Noise([7, 2**63]).at(start, 5)
    there = Noise([7, 2**63], device="cuda").at(start.cuda(), 5)
    for stream in Stream:
        assert torch.equal(here.uniform(stream), there.uniform(stream).cpu())


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
    case = Case(ids[:, None], probs, None, logits, FilterParams(), draws, draws[:, 0])
    tokens, count = by_library(case, rule)
    assert bool((count == 1).all())
    assert torch.equal(tokens, torch.stack([ids, ids + 1], 1))
    if rule == "point":
        drawn, drawn_from = sample(logits[2100:], FilterParams(), draws[2100:].expand(-1, 2))
        assert torch.equal(drawn, tokens[2100:])
        assert bool((drawn_from.gather(-1, drawn[..., None]) > 0.99).all())


def test_more_rows_than_a_grid_dimension_may_have_are_sampled_and_verified():
    rows, vocab = 2**16 + 5, 3
    logits = torch.zeros(rows, 2, vocab, device="cuda")
    logits[..., 1] = 30.0
    draws = torch.full((rows, 2), 0.5, dtype=torch.float64, device="cuda")
    assert bool((sample_tokens(logits, FilterParams(), draws) == 1).all())
    ones = torch.ones(rows, 1, dtype=torch.long, device="cuda")
    probs = torch.nn.functional.one_hot(ones, vocab).float()
    case = Case(ones, probs, None, logits, FilterParams(), draws[:, :1], draws[:, 0])
    for rule in RULES:
        tokens, count = by_library(case, rule)
        assert bool((tokens == 1).all() & (count == 1).all())


def all_ops(case: Case) -> dict:
    """Every operation on a case, as functions without arguments."""
    rows, width = case.logits.shape[:2]
    truncation = Truncation(*on_gpu(random_truncation(rows, 1)[:3]), 60)
    key = torch.arange(2 * rows, device="cuda").view(rows, 2)
    position = torch.arange(rows * width, device="cuda").view(rows, width)
    draws = torch.linspace(0, 0.99, rows * width, dtype=torch.float64, device="cuda")
    ops = {rule: lambda rule=rule: by_library(case, rule) for rule in RULES}
    ops["sample"] = lambda: sample(case.logits, case.params, draws.view(rows, width))
    ops["race"] = lambda: (race(case.logits, case.params, key, position, 3),)
    ops["cutoff"] = lambda: find_cutoff(case.logits, case.params.temperature, truncation)
    return ops


def test_no_operation_waits_for_the_host_and_each_is_one_graph_of_few_launches(monkeypatch):
    monkeypatch.undo()  # filling fresh memory would be launches, too
    case = random_case(4, 3, 9001, 1, dtype=torch.bfloat16, is_filtered=True).cuda()
    for name, op in all_ops(case).items():
        expected = [t.clone() for t in op()]
        launches = launches_of(op)
        assert 1 <= len(launches) <= 5, (name, launches)
        graph, results = graph_of(op)
        for result in results:
            result.zero_()
        for _ in range(2):
            graph.replay()
        assert_equal(tuple(results), tuple(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_repetitions_give_one_cutoff(dtype):
    """Pairs are listed in any order; sums of whole numbers do not depend on it."""
    logits = (3 * torch.randn(16, 6, VOCAB, device="cuda")).to(dtype)
    top_p = torch.full((16,), 0.9, dtype=torch.float64, device="cuda")
    truncation = Truncation(torch.arange(16, device="cuda") % 2 * 50, top_p, None, 50)
    expected = find_cutoff(logits, None, truncation)
    for _ in range(100):
        assert_equal(find_cutoff(logits, None, truncation), expected)


@pytest.mark.parametrize("rule", RULES)
def test_a_hundred_repetitions_give_one_result(rule):
    case = random_case(64, 5, 32000, 7, dtype=torch.bfloat16, is_filtered=False).cuda()
    expected, differs = by_library(case, rule), torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(100):
        for one, other in zip(by_library(case, rule), expected, strict=True):
            differs |= (one != other).any()
    assert not bool(differs)


def test_operations_in_any_order_in_one_graph_give_what_each_gives_alone():
    """Their scratch memory is that of the operations before."""
    ops, generator = [], torch.Generator().manual_seed(1)
    for rows, width, vocab in ((2, 3, 9001), (16, 5, 32000), (1, 1, VOCAB)):
        case = random_case(rows, width, vocab, rows, dtype=torch.bfloat16, is_filtered=False)
        ops += all_ops(case.cuda()).values()
    expected = []
    for op in ops:
        expected.append(op())
        torch.cuda.synchronize()
    order = torch.randint(len(ops), (200,), generator=generator).tolist()
    graph, results = graph_of(lambda: [ops[i]() for i in order])
    graph.replay()
    for i, result in zip(order, results, strict=True):
        assert_equal(result, expected[i])
