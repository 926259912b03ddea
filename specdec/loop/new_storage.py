"""The tensors of a new storage, for calls that none of those that wait can serve."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from specdec.drafters.check import check_state
from specdec.graphs.owned import size_bytes
from specdec.graphs.rows import map_tensors
from specdec.loop.state import Parts, Signature, StepState, TokenBuffer, inputs_of
from specdec.loop.storage import Storage
from specdec.request.call import Request
from specdec.samplers import LogitsFilter

FIRST_TOKENS = 2048
"""Tokens of all rows together that captured storage has room for at least."""
STORAGE_MULTIPLE = 64
"""Numbers of slots are multiples of this."""


def new_storage(
    parts: Parts,
    request: Request,
    signature: Signature,
    serves: tuple,
    *,
    needed: int,
    largest: int,
    must_capture: bool,
    is_first: bool,
    clear: Callable[[], None],
) -> Storage:
    """A storage for calls like the given one, which has to be loaded.

    Args:
        parts, request, signature, serves: of the call.
        needed: slots of each row.
        largest: slots of the largest storage of such calls that there was, 0 for none. Captured
            storage grows to twice as many, where the target has positions and the device memory.
        must_capture, is_first: as of `CapturedStorage`.
        clear: frees the storages that wait, where memory is short.
    """
    wanted, target = 0, parts.target
    if signature.is_captured:
        wanted = 2 * largest or FIRST_TOKENS // signature.batch_size
        if target.max_positions is not None:
            wanted = min(wanted, target.max_positions + signature.num_behind)

    def allocate(count: int) -> StepState:
        num_slots = -(-count // STORAGE_MULTIPLE) * STORAGE_MULTIPLE
        return allocated(signature, num_slots, parts, request)

    state = None
    try:
        state = allocate(max(wanted, needed))
    except (torch.OutOfMemoryError, ValueError):  # or `check_room` says so before
        clear()
    if state is None:  # out of the handler, whose error holds what was allocated
        state = allocate(needed)
    if not signature.is_captured:
        return Storage(parts, state, serves, size_bytes(state))
    from specdec.loop.captured_storage import CapturedStorage  # which no other call needs

    options = {"must_capture": must_capture, "is_first": is_first}
    return CapturedStorage(parts, state, serves, size_bytes(state), **options)


def allocated(signature: Signature, num_slots: int, parts: Parts, request: Request) -> StepState:
    """Tensors for calls like the given one that need at most `num_slots` slots; `load` has to
    follow.
    """
    rows, depth, target = signature.batch_size, signature.depth, parts.target
    device, drafter, request = target.device, parts.drafter, request.filled_to(rows)
    sizes = {"vocab_size": target.vocab_size, "device": device}
    drafter_state = check_state(drafter, rows, num_slots, **sizes)
    features = None
    if target.feature_width:
        shape = rows, depth + 1, target.feature_width
        features = torch.zeros(shape, dtype=target.dtype, device=device)
    options = {"max_window": drafter.num_draft_tokens + 1, "extra_slots": signature.extra_slots}
    cache = target.init_cache(rows, num_slots, **options)
    cache.row_inputs = map_tensors(partial(torch.zeros_like, device=device), inputs_of(request))
    return StepState(
        signature=signature,
        vocab_size=target.vocab_size,
        buffer=TokenBuffer(rows, num_slots, depth=depth, **sizes),
        logits_filter=LogitsFilter(rows, device=device, **request.logits_filter),
        noise=parts.sampler.noise_type([0] * rows, device=device),
        cache=cache,
        drafter_state=drafter_state,
        features=features,
        chunk_start=torch.zeros((), dtype=torch.long, device=device),
    )
