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
    """Turns offsets into absolute ids and checks them.

    Args:
        d2t: `[Vd]` offsets, or `None`.
        t2d: `[V]` membership, or `None`.
        draft_vocab_size: Vd.
        vocab_size: V.

    Returns:
        `[Vd]` int64 ids of the target, `None` for the identity on the full vocabulary; and notes.

    Raises:
        ValueError: no map for a reduced vocabulary, ids outside of the target's, two draft ids of
            one meaning, or a `t2d` that marks other ids.

    Example:
        >>> ids, notes = read_vocab_map(
        ...     torch.tensor([1, 2]), None, draft_vocab_size=2, vocab_size=5)
        >>> ids
        tensor([1, 3])
    """
    if d2t is None:
        if draft_vocab_size < vocab_size:
            raise ValueError(
                f"a head of {draft_vocab_size} draft ids for a vocabulary of {vocab_size} must "
                "bring the map d2t, and this one has none"
            )
        d2t = torch.zeros(vocab_size, dtype=torch.int64)
    own = torch.arange(draft_vocab_size)
    ids = own + d2t.long()
    _check_ids(ids, d2t, vocab_size)
    if t2d is not None and draft_vocab_size < vocab_size:
        _check_membership(ids, t2d, vocab_size)
    is_identity = ids.equal(own)
    if draft_vocab_size == vocab_size and is_identity:
        return None, ["full vocabulary: draft ids are the target's"]
    checks = ["injective", "in range"]
    if t2d is not None and draft_vocab_size < vocab_size:
        checks.append("equal to t2d")
    order = "ascending" if bool((ids.diff() > 0).all()) else "not ascending (as NVIDIA's)"
    notes = [f"d2t: {draft_vocab_size} of {vocab_size} ids, {', '.join(checks)}, {order}"]
    if is_identity:
        notes.append(f"d2t is all zeros: draft ids are the target's first {draft_vocab_size}")
    return ids, notes


def _check_ids(ids: Tensor, d2t: Tensor, vocab_size: int) -> None:
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero().flatten()
    repeated = len(ids) - len(ids.unique())
    if not len(outside) and not repeated:
        return
    if len(outside):
        i = int(outside[0])
        problem = (
            f"draft id {i} + offset {int(d2t[i])} = {int(ids[i])} is outside of 0..{vocab_size - 1}"
        )
    else:
        problem = f"{repeated} draft ids repeat the target id of another"
    values = d2t.long()
    is_absolute = bool(
        ((values >= 0) & (values < vocab_size)).all() and len(values.unique()) == len(values)
    )
    hint = "; read as absolute ids it would be sound, but d2t holds offsets" if is_absolute else ""
    raise ValueError(f"d2t is no map into the target's vocabulary: {problem}{hint}")


def _check_membership(ids: Tensor, t2d: Tensor, vocab_size: int) -> None:
    marked = torch.zeros(vocab_size, dtype=torch.bool)
    marked[ids] = True
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
    own = torch.arange(len(target_ids))
    for name, ids in (
        ("d2t as absolute ids", target_ids - own),
        ("draft ids in ascending order", target_ids.sort().values),
        ("no map: the first ids", own),
    ):
        is_map = bool(((ids >= 0) & (ids < vocab_size)).all()) and len(ids.unique()) == len(ids)
        if is_map and not ids.equal(target_ids):
            yield name, ids


def write_vocab_map(target_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The `d2t` offsets (`[Vd]` int64) and the `t2d` mask (`[V]` bool) of absolute ids.

    Example:
        >>> write_vocab_map(torch.tensor([1, 3]), 5)
        (tensor([1, 2]), tensor([False,  True, False,  True, False]))
    """
    ids = target_ids.long().cpu()
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return ids - torch.arange(len(ids)), t2d
