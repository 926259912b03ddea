"""A context read into rows: the tokens, features and slots that lists of the same text give."""

import torch
from eagle_heads import FeatureLoop
from hypothesis import given
from hypothesis import strategies as st

from specdec.heads.window import read_context

WIDTH, SLOTS = 3, 48
texts = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=8), min_size=1, max_size=4)


def check(rows, texts, context, table):
    """Entry j of a row is (token at start + j + 1, feature at start + j, slot start + j); the slots
    of each row's real entries.
    """
    written = []
    for b, text in enumerate(texts):
        start, count = int(context.start[b]), max(int(context.num_new[b]), 0)
        entries = list(zip(rows.tokens[b].tolist(), rows.slots[b].tolist(), strict=True))
        expected = [(text[start + j + 1], start + j) for j in range(count)]
        assert entries == expected + [(0, SLOTS)] * (len(entries) - count)
        assert max(int(rows.counts[b]), 0) == count
        for j in range(max(int(context.num_new[b]), 0)):
            assert rows.features[b, j].equal(table[b, start + j])
        written.append([slot for _, slot in expected])
    return written


@given(texts, st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_rows_are_those_of_the_text_in_prefill_and_while_drafting(texts, width, chunk_size, seed):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(len(texts), SLOTS, WIDTH, generator=generator)
    loop = FeatureLoop(texts, width, table, garbage=-7)
    written = [set() for _ in texts]

    class Reader:
        def prefill(self, context, state):
            rows = read_context(context, trash=SLOTS)
            for seen, slots in zip(written, check(rows, texts, context, table), strict=True):
                seen.update(slots)

    loop.prefill(Reader(), None, chunk_size)
    assert written == [set(range(len(text) - 2)) for text in texts]
    context = loop.context()
    rows = read_context(context, trash=SLOTS)
    now = check(rows, texts, context, table)
    for count in (0, 1, 3):
        slots = rows.slots_with(count)
        own = rows.slots.shape[1]
        assert slots[:, :own].equal(rows.slots)
        for row, last in zip(slots[:, own:].tolist(), now, strict=True):
            assert row == [last[-1] + 1 + i if last else SLOTS for i in range(count)]
    out = torch.randn(len(texts), rows.tokens.shape[1], 2, generator=generator)
    for b, last in enumerate(now):
        assert rows.last(out)[b, 0].equal(out[b, max(len(last) - 1, 0)])
