"""Vocabulary maps: offsets in files, absolute ids in the library, and nothing else in between."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
        with pytest.raises(ValueError, match="d2t is no map into the target's vocabulary"):
            read(d2t)


@given(ids=subsets.filter(lambda ids: len(ids) < V), place=st.integers(0, V - 1))
def test_a_mask_that_marks_other_ids_is_refused(ids, place):
    d2t, t2d = write_vocab_map(ids, V)
    t2d[place] = ~t2d[place]
    with pytest.raises(ValueError, match=f"t2d contradicts d2t in 1 ids of the target: {place} "):
        read(d2t, t2d)


@pytest.mark.parametrize("d2t", [None, torch.zeros(V, dtype=torch.int64)])
@pytest.mark.parametrize("t2d", [None, torch.zeros(V), torch.ones(V)])
def test_a_full_vocabulary_needs_no_map(d2t, t2d):
    ids, notes = read(d2t, t2d, count=V)
    assert ids is None
    assert notes == ["full vocabulary: draft ids are the target's"]


def test_a_reduced_vocabulary_needs_one():
    with pytest.raises(ValueError, match="a head of 5 draft ids for a vocabulary of 12 must bring"):
        read(None, count=5)


def test_zeros_are_the_first_ids_and_noted():
    ids, notes = read(torch.zeros(5, dtype=torch.int64))
    assert ids.tolist() == [0, 1, 2, 3, 4]
    assert notes[-1] == "d2t is all zeros: draft ids are the target's first 5"


def test_an_order_by_frequency_is_noted():
    ids, notes = read(torch.tensor([7, 1, -2]))
    assert ids.tolist() == [7, 2, 0]
    assert "not ascending" in notes[0]


def test_absolute_ids_in_the_place_of_offsets_are_recognised():
    with pytest.raises(ValueError, match="read as absolute ids it would be sound"):
        read(torch.tensor([3, 7, 11]))


def test_offsets_near_the_end_of_their_type_do_not_wrap_around():
    with pytest.raises(ValueError, match=r"is outside of 0..11"):
        read(torch.tensor([2**63 - 1, 2**63 - 1]))
