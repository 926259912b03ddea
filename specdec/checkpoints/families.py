"""All families of heads whose files are read."""

from __future__ import annotations

from dataclasses import replace

from specdec.checkpoints.assistant import ASSISTANT
from specdec.checkpoints.eagle import EAGLE
from specdec.checkpoints.family import Family
from specdec.checkpoints.mask_token import MASK_TOKEN
from specdec.checkpoints.medusa import MEDUSA
from specdec.checkpoints.mtp import MTP
from specdec.drafters.head.drafter import HeadDrafter

FAMILIES = {
    **{"eagle": EAGLE, "mask-token": MASK_TOKEN, "mtp": MTP},
    **{"medusa": MEDUSA, "assistant": ASSISTANT},
}
"""Heads that are read, by the kinds in names of drafters (`eagle:PATH`)."""
RECOGNISED = EAGLE, MASK_TOKEN, MEDUSA, ASSISTANT
"""Those whose folders are known by their files; prediction modules lie in whole models."""


def family_of_drafter(kind: type[HeadDrafter]) -> Family:
    """The family that a class of drafters drafts with, and loads its heads into: its attribute
    `family`, or that of the package's class that it inherits.

    Raises:
        TypeError: of a class for which nothing reads files.
    """
    if (own := getattr(kind, "family", None)) is not None:
        return replace(own, drafter=kind)
    for family in FAMILIES.values():
        if issubclass(kind, family.drafter):
            return replace(family, drafter=kind)
    raise TypeError(
        f"no files of {kind.__name__} are known; set {kind.__name__}.family to a "
        "specdec.checkpoints.Family of your own"
    )
