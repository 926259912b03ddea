"""`LogitsFilter` is Hugging Face's warpers, one value per row.

Oracles are their own classes (1e-7 in float32, 1e-12 in float64). Temperature 0 is the one-hot
distribution on the lowest id among the largest logits.
"""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from warpers import by_row, filters, huggingface_law

from specdec.kernels import draw
from specdec.lab.certificates.sampler.enumeration import bisect
from specdec.samplers import LogitsFilter
from specdec.samplers.logits_filter import logprobs_of

seeds = st.integers(0, 2**32 - 1)


def random_logits(rows, width, vocab, dtype, seed):
    """`[rows, width, vocab]` logits with ties (quarters) and some forbidden tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-12, 13, (rows, width, vocab), generator=generator).to(dtype) / 4
    is_forbidden = torch.rand(logits.shape, generator=generator) < 0.2
    is_forbidden[..., seed % vocab] = False
    return logits.masked_fill(is_forbidden, -torch.inf)


def oracle(logits, filters):
    return torch.stack(
        [huggingface_law(x, options) for x, options in zip(logits, filters, strict=True)]
    )


@pytest.mark.smoke
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-7), (torch.float64, 1e-12)])
@given(st.lists(filters, min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 33), seeds)
def test_a_filter_is_the_warpers_of_huggingface_with_one_value_per_row(
    dtype, tolerance, filters, width, vocab, seed
):
    logits = random_logits(len(filters), width, vocab, dtype, seed)
    probs = LogitsFilter(len(filters), **by_row(filters))(logits)
    expected = oracle(logits, filters)
    assert probs.dtype == dtype
    assert torch.equal(probs > 0, expected > 0)
    torch.testing.assert_close(probs, expected, rtol=0, atol=tolerance)


@given(st.lists(filters, min_size=1, max_size=4), st.integers(1, 9), seeds)
def test_a_window_of_one_is_a_row_and_a_batch_is_its_rows_alone(filters, vocab, seed):
    logits = random_logits(len(filters), 1, vocab, torch.float32, seed)
    logits_filter = LogitsFilter(len(filters), **by_row(filters))
    probs = logits_filter(logits[:, 0])
    assert torch.equal(probs, logits_filter(logits)[:, 0])
    alone = [LogitsFilter(1, **options)(x) for options, x in zip(filters, logits, strict=True)]
    assert torch.equal(probs, torch.cat(alone))
    single, every = LogitsFilter(len(filters), **filters[0]), by_row(filters[:1] * len(filters))
    assert torch.equal(single(logits), LogitsFilter(len(filters), **every)(logits))
    half = (logits * 1.37).bfloat16()  # widened before anything is computed
    assert logits_filter(half).dtype == torch.float32
    assert torch.equal(logits_filter(half), logits_filter(half.float()))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9, unique=True), st.integers(1, 99))
def test_top_p_keeps_the_smallest_set_of_likely_tokens_that_reaches_p(weights, percent):
    ranked = sorted(weights, reverse=True)
    masses = [Fraction(sum(ranked[:n]), sum(ranked)) for n in range(1, len(ranked) + 1)]
    if Fraction(percent, 100) in masses:
        return  # exactly at an edge rounding decides, as in HF
    size = 1 + sum(mass < Fraction(percent, 100) for mass in masses)
    probs = LogitsFilter(1, top_p=percent / 100)(torch.tensor([weights], dtype=torch.float64).log())
    assert sorted(probs[0].nonzero()[:, 0].tolist()) == sorted(map(weights.index, ranked[:size]))


@given(st.integers(1, 9), seeds)
def test_greedy_rows_take_the_lowest_id_among_the_largest_logits(vocab, seed):
    logits = random_logits(3, 2, vocab, torch.float32, seed)
    logits_filter = LogitsFilter(3, temperature=[0.0, 1.0, 0], top_k=2, top_p=0.5, min_p=0.1)
    assert not logits_filter.is_greedy
    probs = logits_filter(logits)
    for row in (0, 2):
        for logits_of_token, probs_of_token in zip(logits[row], probs[row], strict=True):
            first = logits_of_token.tolist().index(logits_of_token.max().item())
            assert probs_of_token.tolist() == [float(i == first) for i in range(vocab)]


@given(st.integers(1, 9), seeds)
def test_a_batch_of_greedy_rows_draws_the_lowest_id_whatever_the_noise(vocab, seed):
    logits = random_logits(2, 1, vocab, torch.float32, seed)[:, 0]
    logits_filter = LogitsFilter(2, temperature=0, top_p=0.3)
    assert logits_filter.is_greedy
    tokens, probs = logits_filter.draw(logits, torch.full((2,), float("nan"), dtype=torch.float64))
    assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert probs is None  # a point mass
    assert torch.equal(logits_filter(logits), torch.nn.functional.one_hot(tokens, vocab).float())


@given(st.lists(filters, min_size=1, max_size=3), seeds)
def test_a_filter_draws_from_the_probabilities_that_it_returns(filters, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(len(filters), 1, 6, torch.float32, seed)[:, 0]
    uniforms = torch.rand(len(filters), generator=generator, dtype=torch.float64)
    logits_filter = LogitsFilter(len(filters), **by_row(filters))
    tokens, probs = logits_filter.draw(logits, uniforms)
    assert tokens.tolist() == draw(logits_filter(logits), uniforms).tolist()
    assert probs is None if logits_filter.is_greedy else torch.equal(probs, logits_filter(logits))


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", 2.5),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("min_p", -1),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_row(name, bad):
    with pytest.raises(ValueError, match=rf"{name} must be .* in row 1"):
        LogitsFilter(3, **{name: [0.5 if name != "top_k" else 1, bad, None]})


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_a_wrong_number_of_values_is_refused(name):
    with pytest.raises(ValueError, match=rf"{name} has 2 values for a batch of 3 rows"):
        LogitsFilter(3, **{name: [1, 1]})


@given(filters.filter(lambda options: options["temperature"] > 0), seeds)
def test_the_probabilities_that_come_with_a_draw_are_those_of_the_draw(options, seed):
    vocab = 6
    logits = random_logits(1, 1, vocab, torch.float32, seed)[:, 0] * 1.37
    logits_filter, ids = LogitsFilter(vocab, **options), torch.arange(vocab)
    cuts = bisect(lambda u: logits_filter.draw(logits.expand(vocab, -1), u)[0] <= ids, vocab)
    drawn = cuts.diff(prepend=torch.zeros(1, dtype=torch.float64))
    _, returned = logits_filter.draw(
        logits.expand(vocab, -1), torch.zeros(vocab, dtype=torch.float64)
    )
    torch.testing.assert_close(returned[0].double(), drawn, rtol=0, atol=1e-6)


@given(st.lists(filters, min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 33), seeds)
def test_log_probabilities_are_those_of_huggingfaces_law(filters, width, vocab, seed):
    """Of the rows that sample; greedy ones have the logits' own."""
    logits = random_logits(len(filters), width, vocab, torch.float64, seed)
    logits_filter = LogitsFilter(len(filters), **by_row(filters))
    expected = oracle(logits, filters).log()
    is_greedy = torch.tensor([options["temperature"] == 0 for options in filters])
    expected[is_greedy] = logits[is_greedy].log_softmax(dim=-1)
    for token in (0, vocab - 1):
        tokens = torch.full((len(filters), width), token)
        found = logprobs_of(tokens, logits_filter.scores(logits))
        torch.testing.assert_close(found, expected[..., token].float(), rtol=1e-5, atol=1e-6)
    scores = logits_filter.scores(logits)
    assert scores[is_greedy].equal(logits[is_greedy])
    assert scores.data_ptr() != logits.data_ptr()  # who keeps scores keeps no tensor of a step


def test_a_kept_token_whose_probability_underflows_keeps_its_score():
    """As in HF, whose top-k keeps three of these."""
    logits = torch.tensor([[0.0, -200.0, -400.0, -600.0]])
    assert LogitsFilter(1, top_k=3).scores(logits).tolist() == [[0.0, -200.0, -400.0, -torch.inf]]
    third = logprobs_of(torch.tensor([[2]]), LogitsFilter(1, top_k=3).scores(logits[:, None]))
    assert third.tolist() == [[-400.0]]
