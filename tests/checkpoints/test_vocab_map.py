"""Vocabulary maps: offsets in files, absolute ids in the library, and nothing else in between."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from specdec.checkpoints.vocab_map import read_vocab_map, write_vocab_map

V = 12
subsets = st.integers(1, V).flatmap(
    lambda count: st.permutations(range(V)).map(lambda ids: torch.tensor(ids[:count]))
)


def read(d2t, t2d=None, *, count=None, vocab=V):
    count = len(d2t) if count is None else count
    return read_vocab_map(d2t, t2d, draft_vocab_size=count, vocab_size=vocab)


@given(ids=subsets, with_mask=st.booleans())
def test_what_is_written_is_read_back_in_any_order(ids, with_mask):
    d2t, t2d = write_vocab_map(ids, V)
    assert [i + int(offset) for i, offset in enumerate(d2t)] == ids.tolist()
    assert t2d.nonzero().flatten().equal(ids.sort().values)
    again, _ = read(d2t, t2d if with_mask else None)
    if ids.equal(torch.arange(V)):
        assert again is None
    else:
        assert again.equal(ids)


@given(ids=st.lists(st.integers(-3, V + 2), min_size=1, max_size=V).map(torch.tensor))
def test_a_map_is_refused_unless_it_is_injective_and_in_range(ids):
    is_map = ids.min() >= 0 and ids.max() < V and len(ids.unique()) == len(ids)
    d2t = ids - torch.arange(len(ids))
    if is_map:
        read(d2t)
    else:
        with refused("d2t is no map into the target's vocabulary"):
            read(d2t)


@given(ids=subsets.filter(lambda ids: len(ids) < V), place=st.integers(0, V - 1))
def test_a_mask_that_marks_other_ids_is_refused(ids, place):
    d2t, t2d = write_vocab_map(ids, V)
    t2d[place] = ~t2d[place]
    with refused(f"t2d contradicts d2t in 1 ids of the target: {place} "):
        read(d2t, t2d)


NOTED = [
    *(
        (d2t, t2d, V, None, "full vocabulary: draft ids are the target's")
        for d2t in (None, torch.zeros(V, dtype=torch.int64))
        for t2d in (None, torch.zeros(V), torch.ones(V))
    ),
    (
        torch.zeros(5).long(),
        None,
        5,
        [0, 1, 2, 3, 4],
        "d2t is all zeros: draft ids are the target's",
    ),
    (torch.tensor([7, 1, -2]), None, 3, [7, 2, 0], "not ascending"),
]


@pytest.mark.parametrize(("d2t", "t2d", "count", "expected", "note"), NOTED)
def test_maps_that_say_little_are_read_and_noted(d2t, t2d, count, expected, note):
    ids, notes = read(d2t, t2d, count=count)
    assert (ids if ids is None else ids.tolist()) == expected
    assert any(note in each for each in notes)


REFUSED = [
    (None, 5, "a head of 5 draft ids for a vocabulary of 12 must bring"),
    (torch.tensor([3, 7, 11]), 3, "read as absolute ids it would be sound"),
    (torch.tensor([2**63 - 1, 2**63 - 1]), 2, "is outside of 0..11"),  # does not wrap around
]


@pytest.mark.parametrize(("d2t", "count", "message"), REFUSED)
def test_what_cannot_be_a_map_is_refused(d2t, count, message):
    with refused(message):
        read(d2t, count=count)
