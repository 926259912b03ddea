"""What a generator is and how its steps run, in words: whether they are captured, and why not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from specdec import processes
from specdec.drafters import Drafter
from specdec.lab.show.text import draft_size
from specdec.request.call import Request
from specdec.samplers import Sampler
from specdec.slots.room import memory_bytes
from specdec.targets import Target


def headline(target: Target, drafter: Drafter, sampler: Sampler) -> str:
    """A generator in a line."""
    model, rule = target.model, " ".join(str(sampler).split())  # a module with parts prints lines
    return (
        f"SpeculativeGenerator(target {type(model).__name__}, "
        f"{model.num_parameters() / 1e6:.1f} M parameters, {target.dtype} on {target.device}; "
        f"drafter {type(drafter).__name__}, "
        f"{draft_size(drafter.num_draft_tokens, drafter.tree_depth)}; "
        f"sampler {rule})"
    )


def why_never(target: Target, graphs: bool | Literal["auto"]) -> str | None:
    """Why no step of a generator is captured, where it need not be."""
    if graphs is False:
        return "graphs=False"
    if target.device.type != "cuda":
        kind = target.device.type.upper()
        return f"the target is on a {kind} (graphs=True replays there, too, for tests)"
    devices = sorted({str(p.device) for p in target.model.parameters()})
    if len(devices) > 1:
        return f"the target is spread over {', '.join(devices)}, and a graph runs on one device"
    if processes.is_sharded(target.model):
        return "the target is under FSDP2, whose layers the host gathers"
    return None


def why_not_this_call(request: Request, *, is_traced: bool) -> str | None:
    """Why the steps of one call are not, where those of others are."""
    if is_traced:
        return "a trace takes the time of every part of a step"
    if request.processors:
        names = ", ".join(type(p).__name__ for p in request.processors[0][1])
        return f"logits processors are host code, which every step has to wait for: {names}"
    return None


def most_kept(device: torch.device) -> int:
    """Bytes that are kept for later calls where nobody says: a quarter of the device's memory."""
    return (memory_bytes(device) or 2**32) // 4


def describe(pool: Any) -> Iterator[str]:
    """Lines that say how the steps of a `StoragePool` run."""
    if pool.reason is not None:
        yield f"steps are eager: {pool.reason}"
        return
    yield f"steps are captured on {pool.device}"
    if pool.last_reason:
        yield f"the last call was eager: {pool.last_reason}"
    waiting = list(pool)
    for replay in (storage.replay for storage in waiting):
        yield from (f"  {line}" for line in (replay.describe() if replay is not None else ()))
    kept = sum(storage.size_bytes for storage in waiting) / 2**20
    yield f"kept for later calls: {kept:.0f} MiB, of at most {pool.kept_bytes / 2**20:.0f} MiB"


def check_kept(size_bytes: int, kept_bytes: int) -> None:
    """Raises `ValueError` for tensors of a size that will not be kept for another call."""
    if size_bytes > kept_bytes:
        raise ValueError(
            f"kept_bytes is {kept_bytes}, and the tensors of such calls take {size_bytes}, so "
            "nothing would be kept for them; make the generator with a larger kept_bytes"
        )


def standing(generation: Any) -> str:
    """How far a generation has come; waits for the device."""
    rows = len(generation.request.lengths)
    ended = int(generation.has_ended.sum()) + rows - len(generation.rows)
    tree_depth = generation.state.signature.tree_depth
    return (
        f"Generation({ended} of {rows} row{'s' * (rows != 1)} ended; lengths "
        f"{generation.lengths.tolist()}, prompts included; "
        f"{draft_size(generation.num_draft_tokens, tree_depth)})"
    )
