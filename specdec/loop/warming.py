"""What calls of a size compile and capture, before any of them; see
`SpeculativeGenerator.warm_up`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from specdec.arguments import check_integer
from specdec.loop.capturing import check_kept
from specdec.loop.host import Generation
from specdec.loop.lengths import ChooseLength, lengths_to_measure
from specdec.loop.storage import Storage
from specdec.request.call import Request, read_request
from specdec.targets import Target


def inert_request(target: Target, rows: int, tokens: int, options: dict[str, Any]) -> Request:
    """A call of prompts of one token and rows of so many tokens.

    Raises:
        TypeError, ValueError: as `SpeculativeGenerator.start`.
    """
    check_integer("rows", rows, 1)
    check_integer("tokens", tokens, 2)
    if "max_new_tokens" in options:
        raise TypeError("max_new_tokens is part of tokens here; leave it out")
    ids = torch.zeros(rows, 1, dtype=torch.long, device=target.device)
    options = {**options, "max_new_tokens": tokens - 1}
    if target.reads_source:
        from specdec.request.source import inert

        return read_request(target, None, None, {**options, **inert(target, ids)})
    return read_request(target, ids, torch.ones_like(ids), options)


def lengths_in_use(
    generation: Generation, choose: ChooseLength | None, *, is_measured: bool
) -> Iterable[int]:
    """Draft lengths that steps of a call may have where this function chooses them; by what steps
    cost, those that are measured.
    """
    most = generation.parts.drafter.num_draft_tokens
    if choose is None:
        return [generation.num_draft_tokens]
    return lengths_to_measure(most) if is_measured else range(most + 1)


def warm_up(
    generation: Generation,
    choose: ChooseLength | None,
    *,
    is_measured: bool,
    chunk_size: int,
    kept_bytes: int,
) -> None:
    """Runs steps of all draft lengths in use, and prompt chunks of all sizes that come, until
    nothing of them is left to compile or to capture; then closes the generation.

    Args:
        generation: of an `inert_request`. Its rows are ended: nothing is read and nothing
            committed.
        choose: what chooses draft lengths.
        is_measured: it chooses by what steps cost.
        chunk_size: the most tokens of a chunk.
        kept_bytes: that are kept for later calls.

    Raises:
        ValueError: the tensors of such calls are not kept.
    """
    try:
        check_kept(generation.storage.size_bytes, kept_bytes)
        generation.end_rows(generation.rows)
        lengths = lengths_in_use(generation, choose, is_measured=is_measured)
        num_read = generation.request.max_new_tokens - 1
        _run_all(generation.storage, lengths, num_read, chunk_size)
    finally:
        generation.close()


def _run_all(storage: Storage, lengths: Iterable[int], num_read: int, chunk_size: int) -> None:
    count, num_slots = 1, storage.num_slots
    sizes = sorted({1, min(num_read, chunk_size)} if num_read else ())  # any size may come
    if storage.replay is not None:
        count, sizes = storage.replay.num_runs, storage.replay.chunk_sizes(num_read, chunk_size)
    for size in sizes:
        for in_use in {min(size + 1, num_slots), num_slots}:  # first, and later
            with storage.state.narrowed(in_use):
                for _ in range(count):
                    storage.run_chunk(size)
    for length in lengths:
        for _ in range(count):
            storage.stepper(storage.state, length)
