"""Errors of drafters and samplers that return no draft or verdict of a step."""

from __future__ import annotations

from typing import NoReturn

import torch

from specdec.arguments import name_of, shown
from specdec.types import Draft


def refuse_record(
    part: object, record: object, kind: type, shape: tuple[int, int], device: torch.device
) -> NoReturn:
    """Raises an error for a record of another kind, or of other sizes than the step's."""
    name = kind.__name__
    if not isinstance(record, kind):
        found = shown(record)
        raise TypeError(f"{name_of(part)} must return a specdec.types.{name}, got {found}")
    raise ValueError(
        f"{name_of(part)} returned {name.lower()}.tokens of shape {list(record.tokens.shape)} on "
        f"{record.tokens.device}, expected {list(shape)} on {device}; a row may have fewer tokens "
        "(Draft.num_valid, or PAD_TOKEN in a verdict), and the table may not"
    )


def refuse_depth(drafter: object, draft: Draft, tree_depth: int | None) -> NoReturn:
    """Raises an error for a draft that is deeper than its drafter says."""
    raise ValueError(
        f"{name_of(drafter)} returned a draft of depth {draft.depth}, and its tree_depth is "
        f"{tree_depth}; set it to the most tokens that a path of its trees has"
    )


def refuse_vocabulary(drafter: object, draft: Draft, vocab_size: int) -> NoReturn:
    """Raises an error for draft probabilities over another vocabulary."""
    raise ValueError(
        f"{name_of(drafter)} returned draft.probs over a vocabulary of "
        f"{draft.probs.shape[-1]}, but target logits have {vocab_size}; the drafter must "
        "express its probabilities over the target's vocabulary"
    )


def refuse_pathless(sampler: object) -> NoReturn:
    """Raises an error for the verdict of a tree that names no path."""
    raise ValueError(
        f"{name_of(sampler)} returned path=None for a tree; Verdict.path names the nodes of a "
        "tree that were accepted, and is None for a chain"
    )


def refuse_length(num_draft_tokens: int, most: int) -> NoReturn:
    """Raises an error for more draft tokens than a step has room for."""
    raise ValueError(
        f"a step of this generation drafts 0 to {most} tokens, and {num_draft_tokens} were "
        "asked for; a stepper of your own may ask the inner one for fewer, not for more"
    )
