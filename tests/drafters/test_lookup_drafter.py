"""`PromptLookupDrafter` finds what a plain search through a list finds, however the text arrived.

The oracle is written from the class's own words. Texts have small alphabets, so that matches of
every length overlap and compete. Laws that all drafters share are in `test_laws.py`.
"""

import pytest
import torch
from drafting import drawing
from hypothesis import given
from hypothesis import strategies as st
from plain_loop import PlainLoop

from specdec import PromptLookupDrafter
from specdec.types import PAD_TOKEN

CPU = torch.device("cpu")
MAX_LENGTH = 40
texts = st.lists(st.integers(0, 2), min_size=1, max_size=14)
batches = st.lists(texts, min_size=1, max_size=4)
ngrams = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted)


def oracle(text, num_draft_tokens, min_ngram, max_ngram):
    """What followed the best earlier occurrence of the longest n-gram that ends the text."""
    for n in range(min(max_ngram, len(text)), min_ngram - 1, -1):
        ending = text[len(text) - n :]
        follows = [e for e in range(n, len(text)) if text[e - n : e] == ending]
        if follows:
            best = max(follows, key=lambda e: (min(len(text) - e, num_draft_tokens), e))
            return text[best : best + num_draft_tokens]
    return []


def told(drafter):
    """Lookup needs to know K only."""
    return drawing(drafter, None, None)


def make(num_draft_tokens, ngram, rows):
    drafter = PromptLookupDrafter(num_draft_tokens, min_ngram=ngram[0], max_ngram=ngram[1])
    return drafter, drafter.init_state(rows, MAX_LENGTH, vocab_size=3, device=CPU)


def proposals(draft):
    """The valid tokens of each row; all other places hold no token."""
    assert draft.probs is None
    tokens, counts = draft.tokens.tolist(), draft.num_valid.tolist()
    for row, count in zip(tokens, counts, strict=True):
        assert row[count:] == [PAD_TOKEN] * (len(row) - count)
    return [row[:count] for row, count in zip(tokens, counts, strict=True)]


@given(batches, st.integers(0, 4), ngrams)
def test_a_proposal_is_what_a_search_through_the_text_finds(texts, num_draft_tokens, ngram):
    drafter, state = make(num_draft_tokens, ngram, len(texts))
    context = PlainLoop(texts, num_draft_tokens).context_from_scratch()
    expected = [oracle(text, num_draft_tokens, *ngram) for text in texts]
    assert proposals(drafter.propose(context, state, told(drafter))) == expected


@given(st.data(), batches, st.integers(0, 4), ngrams, st.integers(1, 6), st.integers(0, 5))
def test_a_proposal_depends_on_the_text_and_not_on_how_it_arrived(
    data, texts, num_draft_tokens, ngram, chunk_size, slack
):
    drafter, state = make(num_draft_tokens, ngram, len(texts))
    garbage = data.draw(st.integers(-1, 2))
    loop = PlainLoop(texts, num_draft_tokens, garbage=garbage, slack=slack)
    loop.prefill(drafter, state, chunk_size)
    block = st.lists(st.integers(0, 2), max_size=num_draft_tokens + 1)  # [] is a row that ended
    for _ in range(3):
        expected = [oracle(text, num_draft_tokens, *ngram) for text in loop.rows]
        assert proposals(drafter.propose(loop.context(), state, told(drafter))) == expected
        loop.commit([data.draw(block) for _ in texts])


@pytest.mark.parametrize(("smallest", "largest"), [(0, 3), (3, 2), (-1, 1)])
def test_an_empty_range_of_ngrams_is_refused(smallest, largest):
    with pytest.raises(ValueError, match="min_ngram"):
        PromptLookupDrafter(min_ngram=smallest, max_ngram=largest)
