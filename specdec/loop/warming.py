"""What calls of a size compile and capture, before any of them; see
`SpeculativeGenerator.warm_up`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from specdec.arguments import check_integer
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


def warm_up(storage: Storage, lengths: Iterable[int], num_read: int, chunk_size: int) -> None:
    """Runs steps of these draft lengths, and prompt chunks of all sizes that up to `num_read`
    tokens are read in, until nothing of them is left to compile or to capture.

    The call that is loaded has prompts of one token, and all of its rows have ended: nothing is
    read and nothing committed.
    """
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
