"""The Triton kernels of `ragged_attention` are its definition: run by Triton's interpreter. (That
it is a softmax over the visible slots of each row is in `target/test_slot_attention.py`.)
"""

from dataclasses import replace

import pytest
import torch
from attention_cases import Sizes, ancestors, assert_near, random_case, with_visible
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, interpreted, seeds

from specdec.kernels import AttentionOptions, ragged_attention
from specdec.kernels.attention import triton
from specdec.kernels.attention.reference import attends_raggedly, visible_slots
from specdec.kernels.attention.triton import Tiles

sizes = st.builds(
    Sizes,
    rows=st.integers(1, 2),
    queries=st.integers(1, 6),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3]),
    width=st.sampled_from([3, 16, 24, 80]),
    value_width=st.sampled_from([5, 16, 40]),
    slots=st.sampled_from([16, 48, 64]),
)
options = st.fixed_dictionaries(
    {
        "scale": st.sampled_from([None, 0.3]),
        "softcap": st.sampled_from([None, 2.0]),
        "sliding_window": st.sampled_from([None, 0, 1, 5, 20, 500]),
        "num_first": st.sampled_from([None, 1, 4, 17, 40]),
        "has_sinks": st.booleans(),
        "has_mask": st.booleans(),
        "forgets": st.booleans(),
    }
)
cuts = st.builds(
    Tiles,
    block_slots=st.sampled_from([16, 32]),
    block_rows=st.sampled_from([16, 32]),
    num_warps=st.just(4),
    num_stages=st.just(3),
    num_splits=st.sampled_from([1, 2, 3, 9]),
)


@pytest.fixture(autouse=True)
def _bfloat16_products_are_of_numbers(monkeypatch):
    """Triton's interpreter keeps bfloat16 as the integers of its bits, and multiplies those."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder

    create_dot = InterpreterBuilder.create_dot

    def dot(self, *operands):
        is_bits = [getattr(x, "dtype", None) == bfloat16 for x in operands]
        wide = (
            self.create_fp_ext(x, float32) if bits else x
            for x, bits in zip(operands, is_bits, strict=True)
        )
        return create_dot(self, *wide)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@interpreted
@settings(max_examples=8)
@given(sizes, options, cuts, st.sampled_from(DTYPES), seeds)
def test_the_kernels_are_the_definition(sizes, options, tiles, dtype, seed):
    case = random_case(sizes, seed, dtype=dtype, **options)
    assert_near(triton.ragged_attention(*case.arguments, tiles=tiles), case)


@interpreted
def test_the_kernels_are_the_definition_where_keys_hold_all_heads_values():
    """DeepSeek's absorbed form: one head of 576 channels, whose first 512 are the values."""
    case = random_case(Sizes(2, 2, 1, 16, 576, 512, 48), 1, dtype=torch.bfloat16, lengths=[48, 3])
    tiles = Tiles(16, 16, 4, 3, 4)
    assert_near(triton.ragged_attention(*case.arguments, tiles=tiles), case)


@interpreted
@pytest.mark.parametrize("length", [1, 15, 16, 17, 64])
def test_lengths_at_the_edges_of_tiles_are_read_to_their_end(length):
    """Each row's last value is far from all others, so a slot too few or too many shows."""
    case = random_case(Sizes(3, 1, 1, 1, slots=64), length, lengths=[length, 1, 64])
    case.values[0, :, length - 1] = 1000.0
    for num_splits in (1, 4):
        tiles = Tiles(16, 16, 4, 3, num_splits)
        assert_near(triton.ragged_attention(*case.arguments, tiles=tiles), case)


@interpreted
@pytest.mark.parametrize("num_first", [None, 1, 4, 16, 17])
def test_a_sliding_window_reads_its_own_tiles_and_those_of_the_first_slots(num_first):
    """All other slots are NaN, of which one that is read would show."""
    case = random_case(
        Sizes(2, 3, 2, 2, slots=192), 8, lengths=[192, 100], sliding_window=20, num_first=num_first
    )
    places, end = torch.arange(192), case.slots[:, -1:] + 1
    first = (num_first or 0) + 15
    is_far = (places >= first - first % 16) & (places < end - 22)
    expected = ragged_attention(*case.arguments)
    for states in (case.keys, case.values):
        states.masked_fill_(is_far[:, None, :, None], torch.nan)
    for num_splits in (1, 2, 9):
        out = triton.ragged_attention(*case.arguments, tiles=Tiles(16, 16, 4, 3, num_splits))
        torch.testing.assert_close(out, expected)


@interpreted
@pytest.mark.parametrize("sliding_window", [1, 5])
def test_a_tile_of_which_a_query_sees_nothing_adds_nothing(sliding_window):
    """The last queries see no slot of the first tile."""
    case = random_case(Sizes(2, 20, 1, 1), 4, lengths=[40, 21], sliding_window=sliding_window)
    assert_near(triton.ragged_attention(*case.arguments, tiles=Tiles(16, 16, 4, 3, 1)), case)


@interpreted
def test_trees_and_blocks_are_masks_of_the_window():
    tree = ancestors([-1, 0, 0, 1, 1, 2, 5])
    for visible in (tree, torch.ones(7, 7, dtype=torch.bool)):
        for window in (None, 0, 6):
            case = random_case(Sizes(2, 7, 1, 2), 5, lengths=[64, 9], sliding_window=window)
            case = with_visible(case, visible)
            assert_near(triton.ragged_attention(*case.arguments), case)


@interpreted
def test_a_wide_window_with_a_mask_of_its_own():
    case = random_case(Sizes(1, 65, 1, 1, slots=80), 3, has_mask=True)
    assert_near(triton.ragged_attention(*case.arguments), case)


@interpreted
@pytest.mark.parametrize("window", [None, 3, 6, 40])
def test_a_pass_over_one_depth_of_a_tree(window):
    """Three nodes of one depth after six of the depths above, all of which have a mask."""
    generator = torch.Generator().manual_seed(7)
    case = random_case(Sizes(2, 3, 1, 2), 5, lengths=[64, 12], sliding_window=window)
    case = with_visible(case, torch.rand(3, 9, generator=generator) < 0.5)
    positions = (case.slots[:, :1] - 4).expand(-1, 3)
    case = replace(case, options=case.options._replace(positions=positions))
    assert_near(triton.ragged_attention(*case.arguments), case)


@interpreted
def test_states_of_any_layout_are_read_where_they_are():
    case = random_case(Sizes(2, 3, 2, 2, slots=48), 4)
    expected = triton.ragged_attention(*case.arguments)
    by_head = (states.contiguous() for states in (case.keys, case.values))
    assert torch.equal(triton.ragged_attention(case.query, *by_head, case.slots), expected)
    by_channel = (
        states.transpose(2, 3).contiguous().transpose(2, 3)
        for states in (case.query, case.keys, case.values)
    )
    assert torch.equal(triton.ragged_attention(*by_channel, case.slots), expected)
    one = random_case(Sizes(1, 3, 2, 2, slots=48), 4)
    rows = (states.expand(3, -1, -1, -1) for states in (one.query, one.keys, one.values))
    out = triton.ragged_attention(*rows, one.slots.expand(3, -1))
    assert torch.equal(out, triton.ragged_attention(*one.arguments).expand(3, -1, -1, -1))


@interpreted
def test_no_rows_and_no_queries_give_nothing():
    for rows, queries in ((0, 4), (2, 0)):
        case = random_case(Sizes(), 1)
        states = (t[:rows] for t in (case.query[:, :, :queries], case.keys, case.values))
        out = triton.ragged_attention(*states, case.slots[:rows, :queries])
        assert out.shape == (rows, queries, 4, 16)


@interpreted
def test_the_cut_depends_on_shapes_only_and_fills_the_gpu():
    def cut(rows, kv_heads, group, queries, width, slots, dtype=torch.bfloat16):
        keys = torch.empty(rows, slots, kv_heads, width, dtype=dtype).transpose(1, 2)
        query = torch.empty(rows, kv_heads * group, queries, width, dtype=dtype)
        return triton.default_tiles(query, keys, keys)

    assert cut(1, 8, 4, 4, 128, 8192) == Tiles(64, 16, 4, 3, 33)
    assert cut(16, 8, 4, 4, 128, 4096) == Tiles(64, 16, 4, 3, 2)
    assert cut(64, 8, 4, 4, 128, 4096).num_splits == 1
    assert cut(1, 8, 4, 4, 128, 128).num_splits == 2  # one for each tile
    assert cut(1, 8, 8, 8, 64, 4096)[:3] == (128, 64, 8)
    assert cut(1, 8, 4, 4, 128, 4096, torch.float32)[:3] == (32, 16, 4)


@given(sizes, seeds)
def test_a_tree_of_one_branch_is_causal(sizes, seed):
    case = random_case(sizes, seed)
    chain = ancestors(list(range(-1, sizes.queries - 1)))
    ours = ragged_attention(*with_visible(case, chain).arguments)
    assert torch.equal(ours, ragged_attention(*case.arguments))


def test_who_sees_whom_by_hand():
    slots = torch.tensor([[2, 3, 9], [0, 9, 9]])
    options = AttentionOptions(sliding_window=2)
    seen = visible_slots(slots, 6, options)
    assert [row.nonzero().flatten().tolist() for row in seen[0]] == [[1, 2], [2, 3], []]
    assert [row.nonzero().flatten().tolist() for row in seen[1]] == [[0], [], []]
    visible = torch.tensor([[[0, 1, 1], [1, 0, 1], [1, 1, 1]]] * 2, dtype=torch.bool)
    seen = visible_slots(slots, 6, options._replace(window_visible=visible))
    assert [row.nonzero().flatten().tolist() for row in seen[0]] == [[1, 3], [2], []]
    assert [row.nonzero().flatten().tolist() for row in seen[1]] == [[], [], []]


def test_a_cpu_attends_with_dense_masks():
    case = random_case(Sizes(), 1)
    assert not attends_raggedly(case.query, case.keys)
