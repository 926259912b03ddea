"""`draw` over wide rows works in two levels; it draws what one cumulative sum does.

The oracle is exact fractions, as in test_draw_and_warp.py, with blocks of a few weights.
"""

import pytest
import torch
from exact_law import LARGEST_UNIFORM, bisect
from hypothesis import given
from hypothesis import strategies as st
from test_draw_and_warp import ULP, exact_draw, weights

from specdec.graphs import no_host_sync
from specdec.kernels import draw, inverse
from specdec.kernels.inverse import draw_by_blocks

seeds = st.integers(0, 2**32 - 1)
blocks = st.integers(1, 5)


@given(weights, blocks)
def test_a_draw_is_exact_at_every_breakpoint_where_breakpoints_are_floats(weights, size):
    total = 1 << sum(weights).bit_length()
    weights = [*weights, total - sum(weights)]
    cumulative = [sum(weights[: i + 1]) / total for i in range(len(weights) - 1)]
    uniforms = [0.0, LARGEST_UNIFORM, *cumulative, *(u - ULP for u in cumulative if u > 0)]
    table = torch.tensor(weights, dtype=torch.float32).expand(len(uniforms), -1)
    index = draw_by_blocks(table, torch.tensor(uniforms, dtype=torch.float64), size)
    assert index.tolist() == [exact_draw(weights, u) for u in uniforms]


@given(st.integers(2, 60), blocks, seeds)
def test_the_law_of_a_draw_over_float32_weights_is_exact_to_float64(vocab, size, seed):
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(vocab, generator=generator) ** 8
    ids = torch.arange(vocab)
    cuts = bisect(lambda u: draw_by_blocks(table.expand(vocab, -1), u, size) <= ids, vocab)
    law = cuts.diff(prepend=torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(law, table.double() / table.double().sum(), rtol=0, atol=1e-14)


@given(st.integers(1, 40), blocks, st.sampled_from([torch.float32, torch.float64]), seeds)
def test_an_index_of_weight_zero_is_never_drawn(vocab, size, dtype, seed):
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


@pytest.mark.parametrize("vocab", [inverse.WIDE - 1, inverse.WIDE, inverse.WIDE + 77])
def test_wide_rows_are_drawn_from_without_waiting_and_as_by_one_cumulative_sum(vocab):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(2, 4, vocab, generator=generator).mul(4).softmax(-1)
    uniforms = torch.rand(2, 4, generator=generator, dtype=torch.float64)
    with no_host_sync() as seen:
        index = draw(table, uniforms)
    sizes = {shape[-1] for name, shape in seen.shapes if name == "aten.cumsum.default"}
    blocks = -(-vocab // inverse.BLOCK)
    assert sizes == ({vocab} if vocab < inverse.WIDE else {blocks, inverse.BLOCK})
    cumulative = table.double().cumsum(-1)
    expected = (cumulative <= uniforms[..., None] * cumulative[..., -1:]).sum(-1)
    assert torch.equal(index, expected)


def test_weights_that_are_nan_give_some_index_in_range():
    table = torch.full((1, inverse.WIDE), float("nan"))
    index = draw(table, torch.tensor([0.5], dtype=torch.float64))
    assert 0 <= index.item() < inverse.WIDE
