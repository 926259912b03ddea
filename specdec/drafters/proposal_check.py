"""What a `Proposal` may hold, and what its edit and a sampler's `draw_draft` may return."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from specdec.arguments import check_choice, check_number, shown
from specdec.samplers.logits_filter import LEAST_TEMPERATURE
from specdec.samplers.noise import EditDraftLogits


def check_proposal(proposal: Any) -> None:
    """Raises `TypeError` or `ValueError` for settings of a `Proposal` that cannot be right."""
    check_choice("proposal", proposal.kind, ("sample", "argmax"))
    if not (proposal.edit is None or callable(proposal.edit)):
        raise TypeError(
            "Proposal.edit must be a function of logits [B, n, V] that returns logits of the "
            f"same shape, or None, got {shown(proposal.edit)}"
        )
    if proposal.temperature is None:
        return
    advice = "None is the target's, and proposal='argmax' the limit at 0"
    check_number("draft_temperature", proposal.temperature, LEAST_TEMPERATURE, advice=advice)
    if proposal.kind == "argmax":
        raise ValueError("draft_temperature has no meaning with proposal='argmax'; drop one")


def edited(logits: Tensor, edit: EditDraftLogits) -> Tensor:
    """Logits `[B, n, V]` as an edit returns them.

    Raises:
        TypeError: it returned something else than logits of this shape and device.
    """
    found = edit(logits)
    is_like = isinstance(found, Tensor) and found.shape == logits.shape
    if not (is_like and found.is_floating_point() and found.device == logits.device):
        raise TypeError(
            f"the edit of a proposal must return logits {list(logits.shape)} on {logits.device}, "
            f"got {shown(found)}; it gets logits over the target's vocabulary and changes values "
            "alone"
        )
    return found


def refuse_drawn(drawn: object) -> NoReturn:
    """Raises an error for what is no pair of tokens and probabilities."""
    raise TypeError(
        "the sampler's draw_draft must return (int64 tokens [B, n], probabilities [B, n, V]"
        f" or None), got {shown(drawn)}; see specdec.samplers.draw_by_inversion"
    )
