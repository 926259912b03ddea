"""Whether a module is a head that a drafter can draft with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import nn

from specdec.drafters.base import Drafter
from specdec.drafters.tree import Tree
from specdec.drafters.visible import Visible, near_of


def check_head(drafter: Any, head: nn.Module, others: Sequence[Any]) -> None:
    """Raises an error unless the module is a head of a drafter's design with weights.

    Args:
        drafter: a class of `HeadDrafter`.
        head: what it was given.
        others: classes of drafters, one of which may be meant.
    """
    name, own = drafter.__name__, type(head).__name__
    if isinstance(head, Drafter) and hasattr(head, "head_type"):
        raise TypeError(f"expected a head first, got the drafter {own}; pass its .head")
    if not hasattr(getattr(head, "config", None), "feature_layers"):
        raise TypeError(
            f"expected a head first and its target second, got {own}; "
            f"{name}.from_pretrained(path_or_id, target) loads a head"
        )
    if not isinstance(head, drafter.head_type):
        meant = [other for other in others if other.head_type is type(head)]
        advice = f"; pass it to {meant[0].__name__}(head, target)" if meant else ""
        raise TypeError(
            f"{name} drafts with an instance of {drafter.head_type.__name__}, got {own}{advice}"
        )
    if any(parameter.is_meta for parameter in head.parameters()):
        raise ValueError(
            f"the {own} is on the meta device and has no weights; load or build it on a real "
            "one first"
        )


def check_length(length: int, limit: int, *, is_tree: bool) -> None:
    """Raises `ValueError` for paths that are longer than a head predicts."""
    if length > limit:
        name = "Tree.depth" if is_tree else "num_draft_tokens"
        raise ValueError(
            f"the head predicts {limit} tokens of a path; {name} must be at most {limit}, got "
            f"{length}"
        )


def check_ids(config: Any, tree: Tree | None, vocab_size: int) -> None:
    """Raises `ValueError` for a tree of more children than a head has ids, and for a target of
    another vocabulary.
    """
    if tree is not None:  # a selector leaves its candidates alone
        correction = getattr(config, "correction", None)
        tree.check_ids(getattr(correction, "top_k", config.draft_vocab_size))
    if config.vocab_size != vocab_size:
        raise ValueError(
            f"the head was made for a vocabulary of {config.vocab_size} and the target's "
            f"is {vocab_size}; it was made for another target"
        )


def check_visible(drafter: Any, visible: Visible) -> None:
    """Raises an error for what the keys and values of a drafter's own head cannot show."""
    if drafter.reads_target or getattr(drafter.config, "layer", None) is None:
        raise ValueError(
            f"{type(drafter).__name__} keeps no keys and values of its own, of which a part could "
            "be shown; leave out visible="
        )
    near_of(visible)


def refuse_width(config: Any, width: int) -> NoReturn:
    """Raises an error for features of another width, in all, than a head reads."""
    raise ValueError(
        f"the head reads {len(config.feature_layers)} features of width "
        f"{config.target_hidden_size}, {config.feature_width} in all, and the target's are "
        f"{width} wide; it was made for another target"
    )
