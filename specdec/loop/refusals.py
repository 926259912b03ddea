"""Errors of steps that cannot be taken, and of parts that return no draft or verdict of a step."""

from __future__ import annotations

from typing import NoReturn

from specdec.arguments import shown
from specdec.drafters.base import Drafter
from specdec.loop.host import Generation
from specdec.targets import Target


def refuse_generation(generation: object) -> NoReturn:
    """Raises an error for what a generator is asked to step and did not start."""
    if not isinstance(generation, Generation):
        raise TypeError(
            f"generation must be a Generation, got {shown(generation)}; generator.start(ids) "
            "makes one"
        )
    raise ValueError("another generator started this generation; step it with that one")


def check_hooks(target: Target, generation: Generation) -> None:
    """Raises `ValueError` where hooks came to the target, or went, that a step does not run."""
    if not target.has_other_hooks():
        return
    target.check_unchanged()
    if generation.state.signature.is_captured:
        raise ValueError(
            "hooks of the target were registered or removed after this generation was "
            "started, whose steps are captured without them; start another one"
        )


def refuse_features(target: Target, drafter: Drafter) -> NoReturn:
    """Raises `ValueError` for a drafter that was set to read other features since it was joined."""
    raise ValueError(
        f"{type(drafter).__name__} reads the features {drafter.feature_layers}, and the generator "
        f"was made for {target.feature_layers}; make a new SpeculativeGenerator"
    )
