"""`Settable`: an object that says so where what is set on it would have no effect."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

OF_LOGITS = dict.fromkeys(
    ("proposal", "tree", "visible"),
    "drafters with logits have it (of a join set that of a part, join.drafters[1] for one)",
) | {"draft_temperature": "set proposal=Proposal(temperature=0.7) of a drafter with logits"}
"""Settings of drafters with logits, and what to do where they are set on others."""


class Settable:
    """A part whose settings take effect where they are set, or raise `ValueError`.

    Example:
        >>> class Part(Settable):
        ...     _set_once = ("size",)
        >>> part = Part()
        >>> part.size = 3
        >>> part.size = 4
        Traceback (most recent call last):
        ValueError: Part is built of its size; make a new Part with another
    """

    _not_set: ClassVar[Collection[str]] = ()
    """Settings of other parts, which would have no effect on this one."""
    _set_once: ClassVar[Collection[str]] = ()
    """Settings that it is built of."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises `ValueError` for a setting that would have no effect."""
        own = type(self).__name__
        if name in self._not_set:
            advice = OF_LOGITS.get(name, f"pass it to {own}()")
            raise ValueError(f"{own}.{name} would have no effect; {advice}")
        if name in self._set_once and hasattr(self, name):
            raise ValueError(f"{own} is built of its {name}; make a new {own} with another")
        super().__setattr__(name, value)
