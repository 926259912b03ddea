"""The books of a batch: plain Python on the host does to them what operations do on any device."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.graphs import no_host_sync
from specdec.kernels import Books, open_books
from specdec.kernels.host import MAX_ROWS, HostBooks
from specdec.types import PAD_TOKEN, rows_to_keep

VOCAB, ENDS = 7, (5, 2, 900)
BY_ROW = "text", "lengths", "anchor", "remaining", "recent", "start", "num_new"
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=60, deadline=None)


def books_of(kind, rows, width, room, seed):
    """Books of prompts of 1 to 6 tokens."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 6, (rows,), generator=generator)
    text = torch.randint(0, VOCAB, (rows, 6 + room + width), generator=generator)
    sizes = dict(room=room, ends=ENDS, width=width, vocab_size=VOCAB)
    return kind(text, positions.clone(), positions, **sizes)


def emitted(rows, width, seed):
    """Tokens that a sampler may emit, and how many of them it accepted."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.randint(0, width, (rows,), generator=generator)
    tokens = torch.randint(0, VOCAB, (rows, width), generator=generator)
    return tokens.masked_fill_(torch.arange(width) > count[:, None], PAD_TOKEN), count


def contents(books):
    return [value for value in vars(books).values() if isinstance(value, torch.Tensor)]


@few
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 12), seeds)
def test_the_host_keeps_the_books_that_operations_keep(rows, width, room, seed):
    ours, theirs = (books_of(kind, rows, width, room, seed) for kind in (HostBooks, Books))
    for step in range(4):
        block = emitted(rows, width, seed + step)
        assert torch.equal(ours.commit(*block), theirs.commit(*block))
        for one, other in zip(contents(ours), contents(theirs), strict=True):
            assert torch.equal(one, other)


@few
@given(st.data(), st.sampled_from([HostBooks, Books]), st.integers(1, 6), st.integers(1, 5), seeds)
def test_kept_rows_of_books_go_on_as_they_were_in_the_same_memory(data, kind, count, width, seed):
    whole, kept = (books_of(either, count, width, 9, seed) for either in (Books, kind))
    places = {name: getattr(kept, name).data_ptr() for name in BY_ROW}
    numbers = list(range(count))
    for step in range(4):
        tokens, accepted = emitted(count, width, seed + step)
        is_eos = whole.commit(tokens, accepted)[numbers]
        assert torch.equal(kept.commit(tokens[numbers], accepted[numbers]), is_eos)
        for name in BY_ROW:
            assert torch.equal(getattr(kept, name), getattr(whole, name)[numbers])
            assert getattr(kept, name).data_ptr() == places[name]
        is_live = st.lists(st.booleans(), min_size=len(numbers), max_size=len(numbers))
        rows = rows_to_keep(data.draw(is_live.filter(any)))
        numbers = [numbers[row] for row in rows]
        kept = kept.keep(rows)


def test_a_row_keeps_its_tokens_up_to_the_first_end_and_its_room():
    text = torch.tensor([[1, 3, 0, 0, 0, 0, 0, 0, 0]] * 3)
    ones = torch.ones(3, dtype=torch.long)
    books = open_books(text, ones.clone(), ones, room=3, ends=ENDS, width=4, vocab_size=VOCAB)
    assert isinstance(books, HostBooks)
    block = torch.tensor([[4, 6, 5, 0], [4, 6, 1, 0], [4, PAD_TOKEN, PAD_TOKEN, PAD_TOKEN]])
    assert books.commit(block, torch.tensor([3, 3, 0])).tolist() == [True, False, False]
    assert books.num_new.tolist() == [3, 3, 1]
    assert books.lengths.tolist() == [4, 4, 2]
    assert books.anchor.tolist() == [5, 1, 4]
    assert books.start.tolist() == [1, 1, 1]
    assert books.remaining.tolist() == [0, 0, 2]
    assert books.recent[:, 0].tolist() == [3, 3, 3]
    assert books.text[0, :5].tolist() == [1, 3, 4, 6, 5]
    ended = books.commit(torch.tensor([[5, 1, 1, 1]]).repeat(3, 1), torch.tensor([3, 3, 3]))
    assert ended.tolist() == [False, False, True]
    assert books.num_new.tolist() == [0, 0, 1]


@pytest.mark.parametrize("rows", [1, MAX_ROWS, MAX_ROWS + 1])
def test_who_watches_operations_sees_those_of_any_device(rows):
    books, plain = (books_of(kind, rows, 3, 9, seed=1) for kind in (open_books, Books))
    assert isinstance(books, HostBooks) == (rows <= MAX_ROWS)
    block = emitted(rows, 3, seed=2)
    with no_host_sync():
        books.commit(*block)
    plain.commit(*block)
    assert all(torch.equal(*pair) for pair in zip(contents(books), contents(plain), strict=True))
