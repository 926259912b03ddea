"""Leaving decoder layers out: what a drafter runs that is a part of the target."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from transformers import PreTrainedModel

from specdec.arguments import check_integer
from specdec.hf.encoders import hands_biases_on
from specdec.hf.layers import decoder_layers
from specdec.targets.edits.edit import Edit
from specdec.targets.route import Route
from specdec.targets.view import wrap_forward


def check_part(layers: Sequence[int], model: PreTrainedModel, route: Route) -> None:
    """Raises `ValueError` unless a model runs with these of its decoder layers alone."""
    count = len(decoder_layers(model)[1])
    for layer in layers:
        check_integer("layers", layer, 0, count - 1)
    if route.mixers and len({*layers}) < count:
        raise ValueError(
            f"no layers of {type(model).__name__} can be left out: its recurrent layers "
            "remember one window together; run all of them (layers=None)"
        )


def only_layers(layers: Collection[int], *, returns_tuples: bool) -> Edit:
    """An edit that makes the decoder layers but these, by index, hand on what they are given. They
    stay in their places, since models look up by index which mask and which angles a layer gets;
    they neither read nor write their part of a cache.

    Args:
        layers: those that run.
        returns_tuples: layers of the model return their hidden states inside of a tuple.
    """

    def hand_on(_: Callable, *args, **kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden,) if returns_tuples else hidden

    def leave_out(view: PreTrainedModel) -> None:
        if hands_biases_on(view):
            raise ValueError(
                f"no layers of {type(view).__name__} can be left out: its first layer makes biases "
                "for all others; run all of them (layers=None)"
            )
        for index, block in enumerate(decoder_layers(view)[1]):
            if index not in layers:
                wrap_forward(block, hand_on)

    return leave_out
