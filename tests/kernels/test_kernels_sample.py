"""`draw` inverts a cumulative sum exactly, in one level and in two; the Triton kernels of `sample`
and `race` are their definitions, run by Triton's interpreter.

The oracle of `draw` is exact fractions. For two levels the blocks have a few weights.
"""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    DTYPES,
    LARGEST_UNIFORM,
    SMALL,
    assert_race_near,
    assert_sample_near,
    few,
    interpreted,
    quiet,
    random_logits,
    random_params,
    sample_by_kernel,
    seeds,
)

from specdec.graphs import no_host_sync
from specdec.kernels import FilterParams, draw, filtered_probs
from specdec.kernels.race import triton as triton_race
from specdec.kernels.sample import reference
from specdec.kernels.sample.blocks import draw_by_blocks
from specdec.kernels.triton_common import rows_of, softmax_partials
from specdec.lab.certificates.sampler.enumeration import bisect

ULP = 2.0**-52
weights = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)
sizes = st.integers(0, 5)  # of blocks; 0 is one level


def drawn(table, uniforms, size):
    """By one level or by blocks, of one row of weights."""
    uniforms = torch.as_tensor(uniforms, dtype=torch.float64)
    table = table.expand(len(uniforms), -1)
    return draw_by_blocks(table, uniforms, size) if size else draw(table, uniforms)


def exact_draw(weights, u):
    """The first index whose cumulative weight exceeds `u * total`, in exact arithmetic."""
    threshold, mass = Fraction(u) * sum(weights), 0
    for index, weight in enumerate(weights):
        mass += weight
        if mass > threshold:
            return index
    raise AssertionError("u must be below 1")


@given(weights, sizes)
def test_draw_is_exact_at_every_breakpoint_where_breakpoints_are_floats(weights, size):
    total = 1 << sum(weights).bit_length()
    weights = [*weights, total - sum(weights)]
    cumulative = [sum(weights[: i + 1]) / total for i in range(len(weights) - 1)]
    uniforms = [0.0, LARGEST_UNIFORM, *cumulative, *(u - ULP for u in cumulative if u > 0)]
    found = drawn(torch.tensor(weights, dtype=torch.float32), uniforms, size)
    assert found.tolist() == [exact_draw(weights, u) for u in uniforms]


@given(weights, st.lists(st.integers(0, 2**52 - 1), min_size=1))
def test_draw_is_exact_up_to_the_last_bits_of_a_uniform(weights, bits):
    uniforms = [b * ULP for b in bits]
    found = drawn(torch.tensor(weights, dtype=torch.float32), uniforms, 0)
    for u, index in zip(uniforms, found.tolist(), strict=True):
        near = max(u - 4 * ULP, 0), min(u + 4 * ULP, LARGEST_UNIFORM)
        assert exact_draw(weights, near[0]) <= index <= exact_draw(weights, near[1])


@given(st.integers(2, 60), sizes, seeds)
def test_the_probabilities_of_draw_are_the_normalised_weights(vocab, size, seed):
    table = torch.rand(vocab, generator=torch.Generator().manual_seed(seed)) ** 8
    ids = torch.arange(vocab)
    cuts = bisect(lambda u: drawn(table, u, size) <= ids, vocab)
    probs = cuts.diff(prepend=torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(probs, table.double() / table.double().sum(), rtol=0, atol=1e-14)


@given(st.integers(1, 40), sizes, st.sampled_from([torch.float32, torch.float64]), seeds)
def test_an_index_of_weight_zero_is_never_drawn_nor_the_end_reached(vocab, size, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randint(-40, 30, (vocab,), generator=generator)
    table = torch.rand(vocab, generator=generator, dtype=dtype) * 10.0**scale
    table = table.masked_fill(torch.rand(vocab, generator=generator) < 0.5, 0)
    table[seed % vocab] = 1e-40
    cumulative = table.double().cumsum(0)
    at = (cumulative / cumulative[-1]).clamp(0, LARGEST_UNIFORM)
    around = torch.cat([at, (at - ULP).clamp(min=0), (at + ULP).clamp(max=LARGEST_UNIFORM)])
    uniforms = torch.cat([around, torch.tensor([0.0, LARGEST_UNIFORM], dtype=torch.float64)])
    assert bool((table[drawn(table, uniforms, size)] > 0).all())


@given(st.sampled_from([8, 64]), seeds)
def test_a_threshold_that_rounds_past_its_block_falls_on_the_last_positive_weight(size, seed):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randint(-12, 1, (3, size), generator=generator)
    table = torch.rand(3, size, generator=generator, dtype=torch.float64) * 10.0**scale
    table[:, [0, 1, -2, -1]] = 0  # on both sides of every edge between blocks
    edges = table.sum(dim=-1).cumsum(0)
    near = (edges[:2] / edges[2])[:, None] + torch.arange(-6, 7) * ULP / 2
    uniforms = near.flatten().clamp(0, LARGEST_UNIFORM)
    assert bool((table.flatten()[drawn(table.flatten(), uniforms, size)] > 0).all())


@pytest.mark.parametrize(
    "vocab", [7, reference.WIDE_SAMPLE - 1, reference.WIDE_SAMPLE, reference.WIDE_SAMPLE + 77]
)
def test_rows_of_a_table_are_drawn_from_without_waiting_and_as_by_one_cumulative_sum(vocab):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(2, 4, vocab, generator=generator).mul(4).softmax(-1)
    uniforms = torch.rand(2, 4, generator=generator, dtype=torch.float64)
    with no_host_sync():
        index = draw(table, uniforms)
    cumulative = table.double().cumsum(-1)
    expected = (cumulative <= uniforms[..., None] * cumulative[..., -1:]).sum(-1)
    assert torch.equal(index, expected)
    of_nan = draw(torch.full_like(table, torch.nan), uniforms)
    assert bool(((of_nan >= 0) & (of_nan < vocab)).all())


@interpreted
@quiet
@few
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 70), st.sampled_from(DTYPES), seeds)
def test_a_sample_and_a_race_are_their_definitions(rows, width, vocab, dtype, seed):
    logits = random_logits(rows, width, vocab, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(rows, width, generator=generator, dtype=torch.float64)
    params = random_params(logits, seed) if seed % 2 else FilterParams()
    assert_sample_near(logits, params, uniforms, **SMALL)
    row = random_logits(rows, vocab, seed=seed, dtype=dtype)
    assert_sample_near(row, FilterParams(*params[:2]), uniforms[:, 0], **SMALL)
    key = torch.randint(0, 2**32, (rows, 2), generator=generator)
    position = torch.randint(0, 2**32, (rows, width), generator=generator)
    assert_race_near(logits, params, key, position, 3, **SMALL)


@interpreted
def test_a_race_with_another_stream_key_or_position_has_other_winners():
    logits = random_logits(1, 6, 15, seed=1, dtype=torch.float32, spread=0.5)
    key, position = torch.tensor([[1, 2]]), torch.arange(6)[None]
    ours = assert_race_near(logits, FilterParams(), key, position, 3, **SMALL)
    for other in ((key, position, 2), (key + 1, position, 3), (key, position + 1, 3)):
        assert (triton_race.race(logits, FilterParams(), *other, **SMALL) != ours).sum() > 1


@interpreted
@quiet
def test_logits_that_are_nan_give_a_token_of_the_vocabulary():
    logits = torch.full((2, 3, 40), torch.nan)
    params = FilterParams(None, torch.tensor([True, False]))
    key, position = torch.zeros(2, 2, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)
    tokens = triton_race.race(logits, params, key, position, 3, **SMALL)
    assert bool(((tokens >= 0) & (tokens < 40)).all())


@interpreted
def test_a_greedy_row_samples_its_largest_logit_also_beside_others_and_where_it_is_infinite():
    logits = torch.tensor([[0.0, torch.inf, 1.0], [3.0, 0.0, 0.0]])
    params = FilterParams(None, torch.tensor([True, False]))
    token, probs = sample_by_kernel(logits, params, torch.zeros(2).double(), **SMALL)
    assert token.tolist() == [1, 0]
    torch.testing.assert_close(probs, filtered_probs(logits, params), rtol=1e-6, atol=0)


@interpreted
@pytest.mark.parametrize("u", [0.0, 0.5, LARGEST_UNIFORM])
def test_masses_below_the_normal_floats_are_never_drawn_where_they_round_to_zero(u):
    logits = torch.full((1, 1, 64), -104.0)  # exp(-104) is 0 in float32, and 64 of them are not
    logits[0, 0, 40], logits[0, 0, 41] = 0.0, -90.0  # the latter is subnormal
    uniforms = torch.tensor([[u]], dtype=torch.float64)
    token, probs = sample_by_kernel(logits, FilterParams(), uniforms, **SMALL)
    assert probs[0, 0, token.item()] > 0
    assert token.item() == 40


@interpreted
def test_no_rows_have_samples_of_no_rows():
    logits = torch.zeros(0, 3, 40)
    tokens, probs = sample_by_kernel(logits, FilterParams(), torch.zeros(0, 3).double(), **SMALL)
    assert tokens.shape == (0, 3)
    assert probs.shape == (0, 3, 40)


@interpreted
def test_partials_of_indices_that_are_not_drafted_are_not_written():
    """In tests fresh memory of kernels is NaN, so what reads them shows."""
    rows = rows_of(torch.zeros(2, 3, 20), FilterParams())
    partials = softmax_partials(rows, num_valid=torch.tensor([0, 1]), **SMALL)
    expected = torch.tensor([[0, 1, 1], [0, 0, 1]]).bool()[..., None].expand(-1, -1, 2)
    assert torch.equal(partials.row_max.isnan(), expected)
    assert torch.equal(partials.row_sum.isnan(), expected)
