"""Draft vocabularies: from a checkpoint's `d2t` offsets to ids of the target, and back.

`d2t[i]` is an *offset*: draft id i stands for the target's id `i + d2t[i]`, so zeros are the
identity. `t2d` marks the target's ids that the head can propose.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def read_vocab_map(
    d2t: Tensor | None, t2d: Tensor | None, *, draft_vocab_size: int, vocab_size: int
) -> tuple[Tensor | None, list[str]]:
    """Turns offsets `[Vd]` into absolute ids and checks them, also against membership `[V]`.

    Returns:
        `[Vd]` int64 ids of the target, `None` for the identity on the full vocabulary; and notes.

    Example:
        >>> read_vocab_map(torch.tensor([1, 2]), None, draft_vocab_size=2, vocab_size=5)[0]
        tensor([1, 3])
    """
    is_reduced = draft_vocab_size < vocab_size
    if d2t is None:
        if is_reduced:
            raise ValueError(
                f"a head of {draft_vocab_size} draft ids for a vocabulary of {vocab_size} must "
                "bring the map d2t, and this one has none"
            )
        d2t = torch.zeros(vocab_size, dtype=torch.int64, device="cpu")
    own = torch.arange(draft_vocab_size, device="cpu")
    ids = own + d2t.long()
    if problem := _problem(ids, vocab_size):
        hint = ""
        if not _problem(d2t.long(), vocab_size):
            hint = "; read as absolute ids it would be sound, but d2t holds offsets"
        raise ValueError(f"d2t is no map into the target's vocabulary: {problem}{hint}")
    checks = "injective, in range"
    if t2d is not None and is_reduced:
        _check_membership(ids, t2d, vocab_size)
        checks += ", equal to t2d"
    is_identity = ids.equal(own)
    if is_identity and not is_reduced:
        return None, ["full vocabulary: draft ids are the target's"]
    order = "ascending" if bool((ids.diff() > 0).all()) else "not ascending (as NVIDIA's)"
    notes = [f"d2t: {draft_vocab_size} of {vocab_size} ids, {checks}, {order}"]
    if is_identity:
        notes.append(f"d2t is all zeros: draft ids are the target's first {draft_vocab_size}")
    return ids, notes


def _problem(ids: Tensor, vocab_size: int) -> str | None:
    """Why ids are no map, or `None` if they are one."""
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero().flatten()
    if len(outside):
        i = int(outside[0])
        return f"draft id {i} would mean {int(ids[i])}, which is outside of 0..{vocab_size - 1}"
    repeated = len(ids) - len(ids.unique())
    return f"{repeated} draft ids repeat the target id of another" if repeated else None


def _check_membership(ids: Tensor, t2d: Tensor, vocab_size: int) -> None:
    marked = torch.zeros(vocab_size, dtype=torch.bool, device="cpu").index_fill(0, ids, True)
    differing = (marked != t2d.bool()).nonzero().flatten()
    if len(differing):
        first = int(differing[0])
        by, other = ("d2t", "t2d") if marked[first] else ("t2d", "d2t")
        raise ValueError(
            f"t2d contradicts d2t in {len(differing)} ids of the target: {first} is a draft id by "
            f"{by} and not by {other}"
        )


def other_maps(target_ids: Tensor, vocab_size: int) -> Iterator[tuple[str, Tensor]]:
    """Misreadings of a map that are maps themselves, each as name and ids."""
    own = torch.arange(len(target_ids), device="cpu")
    for name, ids in (
        ("d2t as absolute ids", target_ids - own),
        ("draft ids in ascending order", target_ids.sort().values),
        ("no map: the first ids", own),
    ):
        if not _problem(ids, vocab_size) and not ids.equal(target_ids):
            yield name, ids


def write_vocab_map(target_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The `d2t` offsets (`[Vd]` int64) and the `t2d` mask (`[V]` bool) of absolute ids.

    Example:
        >>> write_vocab_map(torch.tensor([1, 3]), 5)
        (tensor([1, 2]), tensor([False,  True, False,  True, False]))
    """
    ids = target_ids.long().cpu()
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device="cpu").index_fill(0, ids, True)
    return ids - torch.arange(len(ids), device="cpu"), t2d
