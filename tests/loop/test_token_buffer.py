"""The token buffer of a batch against plain lists, row by row."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.graphs import no_host_sync
from specdec.graphs.rows import keep_rows, rows_to_keep
from specdec.loop.state import TokenBuffer
from specdec.types import PAD_TOKEN

VOCAB, ENDS = 7, [(5, 2, 900), (0, -1)]
BY_ROW = "tokens", "root_position", "root", "remaining", "recent", "num_new"
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=30, deadline=None)


class Row:
    """What one row of a buffer has to hold."""

    def __init__(self, prompt, room, width, ends):
        self.text, self.room, self.width, self.ends = list(prompt), room, width, ends
        self.num_new = min(len(prompt) - 1, 1)

    def commit(self, emitted) -> bool:
        """Whether the row ends with an end-of-sequence token."""
        kept = emitted[: self.room]
        end = next((i + 1 for i, token in enumerate(kept) if token in self.ends), None)
        kept = kept[:end]
        self.text += kept
        self.num_new = len(kept)
        self.room = 0 if end else self.room - len(kept)
        return end is not None

    def check(self, buffer, row):
        length = len(self.text)
        assert buffer.tokens[row, :length].tolist() == self.text
        assert buffer.root_position[row] == length - 1
        assert buffer.root[row] == self.text[-1]
        assert buffer.remaining[row] == self.room
        assert buffer.num_new[row] == self.num_new
        start = length - 1 - self.num_new
        assert buffer.start[row] == start
        assert buffer.recent[row, : self.num_new + 1].tolist() == self.text[start:]


def prompts(rows, generator):
    lengths = torch.randint(1, 7, (rows,), generator=generator).tolist()
    return torch.randint(0, VOCAB, (rows, 6), generator=generator), lengths


def emitted(rows, width, generator):
    """Tokens that a sampler may emit, and how many of them it accepted."""
    count = torch.randint(0, width, (rows,), generator=generator)
    tokens = torch.randint(0, VOCAB, (rows, width), generator=generator)
    return tokens.masked_fill_(torch.arange(width) > count[:, None], PAD_TOKEN), count


@few
@given(st.data(), st.integers(1, 6), st.integers(0, 4), st.integers(1, 12), seeds)
def test_a_buffer_holds_what_lists_hold_also_when_rows_leave(data, rows, drafted, room, seed):
    generator, width = torch.Generator().manual_seed(seed), drafted + 1
    whole = TokenBuffer(rows, 6 + room + width, depth=drafted, vocab_size=VOCAB)
    addresses = [getattr(whole, name).data_ptr() for name in BY_ROW]
    for ends in ENDS:  # the second call takes over the tensors of the first
        tokens, lengths = prompts(rows, generator)
        whole.load(tokens, lengths, max_new_tokens=room, eos=ends)
        pairs = zip(tokens.tolist(), lengths, strict=True)
        own = [Row(text[:length], room, width, ends) for text, length in pairs]
        buffer = whole
        for row, expected in enumerate(own):
            expected.check(buffer, row)
        for _ in range(3):
            block, accepted = emitted(len(own), width, generator)
            with no_host_sync():
                is_eos = buffer.commit(block, accepted)
            pairs = zip(block.tolist(), accepted.tolist(), own, strict=True)
            assert is_eos.tolist() == [row.commit(b[: n + 1]) for b, n, row in pairs]
            for row, expected in enumerate(own):
                expected.check(buffer, row)
            assert [getattr(buffer, name).data_ptr() for name in BY_ROW] == addresses
            is_live = st.lists(st.booleans(), min_size=len(own), max_size=len(own))
            kept = rows_to_keep(data.draw(is_live.filter(any)))
            own, buffer = [own[row] for row in kept], keep_rows(buffer, kept)
