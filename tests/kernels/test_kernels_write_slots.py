"""`write_slots` puts a window's keys and values into its slots and nowhere else: definition, and
Triton kernel run by Triton's interpreter.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, interpreted, seeds

from specdec.kernels import write_slots
from specdec.kernels.slots import triton
from specdec.kernels.slots.reference import writes_slots
from specdec.slots.cache import SlotCache
from specdec.slots.layout import KeyValueShape

WAYS = {"definition": write_slots, "kernel": triton.write_slots}
sizes = st.tuples(*(st.integers(1, most) for most in (3, 3, 4)))  # rows, heads, tokens
widths = st.tuples(st.sampled_from([3, 8]), st.sampled_from([0, 1, 8, 12]))
"""Of keys and of values, which layers without values have none of."""


@interpreted
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=15)
@given(sizes, widths, st.sampled_from(DTYPES), st.booleans(), seeds)
def test_a_windows_states_are_written_to_its_slots_and_nowhere_else(
    way, sizes, widths, dtype, is_transposed, seed
):
    (rows, heads, count), num_slots = sizes, 9
    generator = torch.Generator().manual_seed(seed)
    slots = torch.rand(rows, num_slots, generator=generator).argsort(1)[:, :count]
    states, storage, expected = [], [], []
    for width in widths:
        table = torch.randn(rows, heads, count, width, generator=generator).to(dtype)
        states.append(table.mT.contiguous().mT if is_transposed else table)
        storage.append(torch.full((rows, num_slots, heads, width), 7.0, dtype=dtype))
        expected.append(storage[-1].clone())
        for row in range(rows):
            for i, slot in enumerate(slots[row].tolist()):
                expected[-1][row, slot] = table[row, :, i]
    WAYS[way](*storage, *states, slots)
    assert torch.equal(storage[0], expected[0])
    assert torch.equal(storage[1], expected[1])


@interpreted
def test_a_slot_outside_the_cache_is_not_written_by_the_kernel():
    table = torch.full((4, 5, 1, 2), 7.0)  # rows before and after those of the cache
    keys, values = table[1:3], table[1:3].clone()
    states = torch.zeros(2, 1, 2, 2)
    triton.write_slots(keys, values, states, states, torch.tensor([[5, -1], [0, 99]]))
    assert int((table == 0).sum()) == 2
    assert int((values == 0).sum()) == 2


@interpreted
def test_a_cache_that_is_written_by_the_kernel_is_the_same(monkeypatch):
    shapes = {0: KeyValueShape(2, 4, 6, torch.float32, torch.device("cpu"))}
    one, other = SlotCache(3, 16, shapes), SlotCache(3, 16, shapes)
    slots = torch.tensor([[0, 1], [7, 8], [3, 16]])
    states = torch.randn(3, 2, 2, 4), torch.randn(3, 2, 2, 6)
    one.open_window(slots)
    theirs = one.update(*states, 0)
    other.has_kernels = True
    monkeypatch.setattr("specdec.kernels.slots.reference.writes_slots", lambda *_: True)
    monkeypatch.setattr("specdec.kernels.slots.reference.write_slots", triton.write_slots)
    other.open_window(slots)
    ours = other.update(*states, 0)
    for mine, his in zip(ours, theirs, strict=True):
        assert torch.equal(mine, his)
        assert mine.stride() == his.stride()
    assert torch.equal(other.keys[0], one.keys[0])
    assert torch.equal(other.values[0], one.values[0])


def test_a_cpu_writes_by_index_copies():
    assert not writes_slots(torch.zeros(1), torch.zeros(1))
