"""`draw` inverts a cumulative sum exactly, in one level and in two.

The oracle is exact fractions. For two levels the blocks have a few weights. That the Triton kernels
of `sample` are its definition is in `test_kernels_sample_triton`.
"""

from fractions import Fraction

import pytest
import torch
from exact_law import LARGEST_UNIFORM, bisect
from hypothesis import given
from hypothesis import strategies as st

from specdec.graphs import no_host_sync
from specdec.kernels import draw
from specdec.kernels.sample import reference
from specdec.kernels.sample.reference import draw_by_blocks

ULP = 2.0**-52
weights = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)
seeds = st.integers(0, 2**32 - 1)
blocks = st.integers(1, 5)


def exact_draw(weights, u):
    """The first index whose cumulative weight exceeds `u * total`, in exact arithmetic."""
    threshold, mass = Fraction(u) * sum(weights), 0
    for index, weight in enumerate(weights):
        mass += weight
        if mass > threshold:
            return index
    raise AssertionError("u must be below 1")


def drawn(weights, uniforms, dtype=torch.float32):
    table = torch.tensor(weights, dtype=dtype).expand(len(uniforms), -1)
    return draw(table, torch.tensor(uniforms, dtype=torch.float64)).tolist()


@given(weights)
def test_draw_is_exact_at_every_breakpoint_where_breakpoints_are_floats(weights):
    total = 1 << sum(weights).bit_length()
    weights = [*weights, total - sum(weights)]
    cumulative = [sum(weights[: i + 1]) / total for i in range(len(weights) - 1)]
    uniforms = [0.0, LARGEST_UNIFORM, *cumulative, *(u - ULP for u in cumulative if u > 0)]
    assert drawn(weights, uniforms) == [exact_draw(weights, u) for u in uniforms]


@given(weights, st.lists(st.integers(0, 2**52 - 1), min_size=1))
def test_draw_is_exact_up_to_the_last_bits_of_a_uniform(weights, bits):
    uniforms = [b * ULP for b in bits]
    for u, index in zip(uniforms, drawn(weights, uniforms), strict=True):
        near = max(u - 4 * ULP, 0), min(u + 4 * ULP, LARGEST_UNIFORM)
        assert exact_draw(weights, near[0]) <= index <= exact_draw(weights, near[1])


@given(weights)
def test_the_probabilities_of_draw_are_the_normalised_weights(weights):
    table = torch.tensor(weights, dtype=torch.float64)
    ids = torch.arange(len(weights))
    cuts = bisect(lambda u: draw(table.expand(len(ids), -1), u) <= ids, len(ids))
    probs = cuts.diff(prepend=torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(probs, table / table.sum(), rtol=0, atol=1e-14)


@given(st.integers(2, 60), seeds)
def test_the_probabilities_of_draw_over_float32_weights_are_exact_to_float64(vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(vocab, generator=generator) ** 8
    ids = torch.arange(vocab)
    cuts = bisect(lambda u: draw(table.expand(vocab, -1), u) <= ids, vocab)
    probs = cuts.diff(prepend=torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(probs, table.double() / table.double().sum(), rtol=0, atol=1e-14)


@given(st.integers(1, 40), st.sampled_from([torch.float32, torch.float64]), seeds)
def test_an_index_of_weight_zero_is_never_drawn_nor_the_end_reached(vocab, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(-40, 30, (vocab,), generator=generator)
    table = torch.rand(vocab, generator=generator, dtype=dtype) * 10.0**size
    is_zero = torch.rand(vocab, generator=generator) < 0.5
    table = table.masked_fill(is_zero, 0)
    table[seed % vocab] = 1e-40
    cumulative = table.double().cumsum(0)
    at = (cumulative / cumulative[-1]).clamp(0, LARGEST_UNIFORM)
    around = torch.cat([at, (at - ULP).clamp(min=0), (at + ULP).clamp(max=LARGEST_UNIFORM)])
    uniforms = torch.cat([around, torch.tensor([0.0, LARGEST_UNIFORM], dtype=torch.float64)])
    index = draw(table.expand(len(uniforms), -1), uniforms)
    assert bool((table[index] > 0).all())


@given(seeds)
def test_draw_over_many_dimensions_is_draw_over_each_row(seed):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 4, (2, 3, 5), generator=generator).float() + 1e-3
    uniforms = torch.rand(2, 3, generator=generator, dtype=torch.float64)
    together = draw(table, uniforms).flatten().tolist()
    rows = zip(table.flatten(0, 1), uniforms.flatten(), strict=True)
    assert together == [draw(row, u).item() for row, u in rows]


@given(weights, blocks)
def test_by_blocks_a_draw_is_exact_at_every_breakpoint_where_breakpoints_are_floats(weights, size):
    total = 1 << sum(weights).bit_length()
    weights = [*weights, total - sum(weights)]
    cumulative = [sum(weights[: i + 1]) / total for i in range(len(weights) - 1)]
    uniforms = [0.0, LARGEST_UNIFORM, *cumulative, *(u - ULP for u in cumulative if u > 0)]
    table = torch.tensor(weights, dtype=torch.float32).expand(len(uniforms), -1)
    index = draw_by_blocks(table, torch.tensor(uniforms, dtype=torch.float64), size)
    assert index.tolist() == [exact_draw(weights, u) for u in uniforms]


@given(st.integers(2, 60), blocks, seeds)
def test_by_blocks_probabilities_over_float32_weights_are_exact_to_float64(vocab, size, seed):
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(vocab, generator=generator) ** 8
    ids = torch.arange(vocab)
    cuts = bisect(lambda u: draw_by_blocks(table.expand(vocab, -1), u, size) <= ids, vocab)
    probs = cuts.diff(prepend=torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(probs, table.double() / table.double().sum(), rtol=0, atol=1e-14)


@given(st.integers(1, 40), blocks, st.sampled_from([torch.float32, torch.float64]), seeds)
def test_by_blocks_an_index_of_weight_zero_is_never_drawn(vocab, size, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randint(-40, 30, (vocab,), generator=generator)
    table = torch.rand(vocab, generator=generator, dtype=dtype) * 10.0**scale
    table = table.masked_fill(torch.rand(vocab, generator=generator) < 0.6, 0)
    table[seed % vocab] = 1e-40
    cumulative = table.double().cumsum(0)
    at = (cumulative / cumulative[-1]).clamp(0, LARGEST_UNIFORM)
    around = torch.cat([at, (at - ULP).clamp(min=0), (at + ULP).clamp(max=LARGEST_UNIFORM)])
    uniforms = torch.cat([around, torch.tensor([0.0, LARGEST_UNIFORM], dtype=torch.float64)])
    index = draw_by_blocks(table.expand(len(uniforms), -1), uniforms, size)
    assert bool((table[index] > 0).all())


@given(st.sampled_from([8, 64]), seeds)
def test_a_threshold_that_rounds_past_its_block_falls_on_the_last_positive_weight(size, seed):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randint(-12, 1, (3, size), generator=generator)
    table = torch.rand(3, size, generator=generator, dtype=torch.float64) * 10.0**scale
    table[:, [0, 1, -2, -1]] = 0  # on both sides of every edge between blocks
    edges = table.sum(dim=-1).cumsum(0)
    near = (edges[:2] / edges[2])[:, None] + torch.arange(-6, 7) * ULP / 2
    uniforms = near.flatten().clamp(0, LARGEST_UNIFORM)
    index = draw_by_blocks(table.flatten().expand(len(uniforms), -1), uniforms, size)
    assert bool((table.flatten()[index] > 0).all())


@pytest.mark.parametrize("vocab", [reference.WIDE - 1, reference.WIDE, reference.WIDE + 77])
def test_wide_rows_are_drawn_from_without_waiting_and_as_by_one_cumulative_sum(vocab):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(2, 4, vocab, generator=generator).mul(4).softmax(-1)
    uniforms = torch.rand(2, 4, generator=generator, dtype=torch.float64)
    with no_host_sync() as seen:
        index = draw(table, uniforms)
    sizes = {shape[-1] for name, shape in seen.shapes if name == "aten.cumsum.default"}
    blocks = -(-vocab // reference.BLOCK)
    assert sizes == ({vocab} if vocab < reference.WIDE else {blocks, reference.BLOCK})
    cumulative = table.double().cumsum(-1)
    expected = (cumulative <= uniforms[..., None] * cumulative[..., -1:]).sum(-1)
    assert torch.equal(index, expected)


def test_weights_that_are_nan_give_some_index_in_range():
    table = torch.full((1, reference.WIDE), float("nan"))
    index = draw(table, torch.tensor([0.5], dtype=torch.float64))
    assert 0 <= index.item() < reference.WIDE
