"""Prompts are read in chunks that cover them in the least time."""

from functools import cache

import pytest

from specdec.loop.prefill import chunks
from specdec.loop.replay import CHUNK_OVERHEAD, captured_sizes, chunk_sizes, covering_chunks


def cost(sizes, rows):
    return sum(rows * size + CHUNK_OVERHEAD for size in sizes)


@pytest.mark.parametrize("captured", [(64,), (64, 256), (64, 256, 1024), (64, 256, 512, 1024)])
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_captured_chunks_cover_what_is_left_at_the_least_cost(captured, rows):
    """The oracle tries every way to cover so many tokens."""

    @cache
    def least(length):
        if length <= 0:
            return 0
        return min(rows * size + CHUNK_OVERHEAD + least(length - size) for size in captured)

    for length in (*range(1, 1200, 7), 1499, 2047):
        found = covering_chunks(length, 2048, captured, rows)
        assert set(found) <= set(captured)
        assert sum(found) - found[-1] < length <= sum(found)
        assert cost(found, rows) == least(length)


@pytest.mark.parametrize("captured", [(), (64, 256, 1024)])
def test_no_chunk_is_larger_than_was_asked_for(captured):
    for chunk_size in (1, 63, 64, 300, 2048):
        for length in (0, 1, 64, 299, 300, 2048, 5000):
            found = covering_chunks(length, chunk_size, captured)
            assert max(found, default=0) <= chunk_size
            assert sum(found) >= length
            assert captured or found == chunks(length, chunk_size)
            fits = [size for size in captured if size <= chunk_size]
            assert set(found) <= {chunk_size, *fits} if fits else sum(found) == length


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 300])
def test_sizes_of_chunks_are_those_that_come(rows):
    captured = captured_sizes(rows)
    assert max((rows * size for size in captured), default=0) <= 16_384
    for most, chunk_size in ((0, 2048), (1, 2048), (63, 2048), (700, 100), (3000, 2048)):
        lengths = range(most + 1)
        come = {s for n in lengths for s in covering_chunks(n, chunk_size, captured, rows)}
        found = set(chunk_sizes(most, chunk_size, captured, rows))
        if captured:
            assert found == come
        else:  # any size comes
            assert found == {1, min(most, chunk_size)} & come
