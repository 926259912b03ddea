"""Leaving decoder layers out: what a drafter runs that is a part of the target."""

from __future__ import annotations

from collections.abc import Callable, Collection

from transformers import PreTrainedModel

from specdec.targets.edits.edit import Edit
from specdec.targets.features import decoder_layers
from specdec.targets.route import Route
from specdec.targets.view import wrap_forward


def only_layers(layers: Collection[int], route: Route) -> Edit:
    """An edit that makes the decoder layers but these hand on what they are given. They stay in
    their places, since models look up by index which mask and which angles a layer gets; they
    neither read nor write their part of a cache.

    Args:
        layers: those that run, by index.
        route: of the model.

    Raises:
        ValueError: from the edit: layers are to be left out of a model with recurrent ones.
    """

    def hand_on(_: Callable, *args, **kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden,) if route.returns_tuples else hidden

    def leave_out(view: PreTrainedModel) -> None:
        left_out = [b for i, b in enumerate(decoder_layers(view)[1]) if i not in layers]
        if left_out and route.mixers:
            raise ValueError(
                f"no layers of {type(view).__name__} can be left out: its recurrent layers "
                "remember one window together; run all of them (layers=None)"
            )
        for block in left_out:
            wrap_forward(block, hand_on)

    return leave_out
