"""How prompts are read before the first step: in chunks, of which a few sizes are captured.

Chunks read and write the tensors of one `StepState`, as steps do: nothing in them waits for the
device.

Legend: B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from specdec.loop.state import Parts, StepState
from specdec.request.call import Request
from specdec.types import Context

CAPTURED_CHUNKS = (64, 256, 512, 1024)
"""Tokens of the prompt chunks that are captured, ascending. A GPU reads 256 tokens in hardly more
time than it takes to read the weights; launching the same work eagerly takes ten times as long.
"""
MOST_CAPTURED_TOKENS = 16_384
"""Of all rows of a captured chunk together: what it computes in is kept as long as its graph."""
CHUNK_OVERHEAD = 128
"""A chunk takes, besides the arithmetic of its tokens, as long as that of so many more."""


def captured_sizes(rows: int) -> tuple[int, ...]:
    """Sizes of the chunks that are captured for a batch."""
    return tuple(size for size in CAPTURED_CHUNKS if rows * size <= MOST_CAPTURED_TOKENS)


def chunks(
    length: int, chunk_size: int, captured: tuple[int, ...] = (), rows: int = 1
) -> Iterator[int]:
    """Sizes of the chunks that a prompt is read in.

    Args:
        length: tokens to read.
        chunk_size: the most tokens of a chunk.
        captured: sizes that there are graphs for, ascending. What is left after chunks of
            `chunk_size` is read in those of them that take the least time.
        rows: B.

    Example:
        >>> list(chunks(5000, 2048)), list(chunks(2600, 2048, (64, 256)))
        ([2048, 2048, 904], [2048, 256, 256, 64])
        >>> sizes = (64, 256, 1024)
        >>> list(chunks(900, 2048, sizes)), list(chunks(700, 2048, sizes, rows=8))
        ([1024], [256, 256, 64, 64, 64])
    """
    captured = tuple(size for size in captured if size <= chunk_size)
    yield from [chunk_size] * (length // chunk_size)
    if rest := length % chunk_size:
        yield from _covering(rest, captured, CHUNK_OVERHEAD / rows) if captured else [rest]


def _covering(length: int, sizes: tuple[int, ...], overhead: float) -> list[int]:
    """Of these sizes, ascending, the chunks that read so many tokens in the least time: as many of
    the largest as are full, and for the rest one more or some that are smaller.
    """
    *smaller, size = sizes
    found, rest = [size] * (length // size), length % size
    if rest:
        ways = [[size], *([_covering(rest, smaller, overhead)] if smaller else [])]
        found += min(ways, key=lambda way: sum(way) + overhead * len(way))
    return found


def chunk_sizes(
    length: int, chunk_size: int, captured: tuple[int, ...] = (), rows: int = 1
) -> list[int]:
    """All sizes of the chunks that at most so many tokens are read in. Without captured ones any
    size may come; for them stand the largest, and one token, which is compiled for itself.
    """
    if not captured and length:
        return sorted({1, min(length, chunk_size)})
    lengths = range(1, min(length, 2 * chunk_size) + 1)
    return sorted({size for n in lengths for size in chunks(n, chunk_size, captured, rows)})


def prefill(
    state: StepState,
    request: Request,
    run_chunk: Callable[[int], None],
    *,
    chunk_size: int,
    captured: tuple[int, ...] = (),
) -> None:
    """Brings a freshly loaded state to the point where every row looks as if a step had just
    committed its last prompt token.

    Args:
        state: updated in place.
        request: that was loaded.
        run_chunk: `prefill_chunk` of the state, or a graph of it, given the chunk's size.
        chunk_size, captured: see `chunks`. Chunks of these sizes attend over all slots, unless they
            are the first.
    """
    start = 0
    length, rows = max(request.lengths) - 1, state.signature.batch_size
    for size in chunks(length, chunk_size, captured, rows):
        state.chunk_start.fill_(start)
        most, is_fixed = state.cache.num_slots, start > 0 and size in captured
        with state.narrowed(most if is_fixed else start + size + 1):
            run_chunk(size)
        start += size


def prefill_chunk(parts: Parts, state: StepState, size: int) -> None:
    """Reads the prompts' tokens of positions `chunk_start` to `chunk_start + size - 1`, in the rows
    that have them.

    The target reads all but the last prompt token of each row. Features of a chunk go to the
    drafter and are dropped, so memory does not grow with the prompt; the last one stays for the
    first proposal.

    Args:
        parts: the target reads the prompts, the drafter follows with the features.
        state: updated in place.
        size: tokens of the chunk.
    """
    buffer, start = state.buffer, state.chunk_start
    num_read = buffer.anchor_position  # [B], of the last prompt token
    positions = start + torch.arange(size + 1, device=start.device)
    known = positions.clamp(max=buffer.tokens.shape[1] - 1)
    tokens = buffer.tokens.index_select(1, known)  # [B, size + 1]
    inputs = state.target_inputs(parts)
    features = parts.target.prefill(state.cache, tokens[:, :-1], num_read, offset=start, **inputs)
    context = Context(
        tokens=tokens,
        features=features,
        start=start.repeat(len(num_read)),
        # The pair (feature of the last token read, last prompt token) is left to the first
        # proposal.
        num_new=(num_read - 1 - start).clamp(-1, size),
        target=state.text(parts, num_read.clamp(max=start + size)),
        row_inputs=state.row_inputs,
    )
    if state.signature.num_draft_tokens > 0:
        parts.drafter.prefill(context, state.drafter_state)
    if features is not None:
        index = num_read - 1 - start
        is_here = (index >= 0) & (index < size)
        rows = torch.arange(len(index), device=index.device)
        last = features[rows, index.clamp(0, size - 1)]
        state.features[:, 0] = torch.where(is_here[:, None], last, state.features[:, 0])
