"""Drafters: components that propose tokens."""

from importlib import import_module

from specdec.drafters.base import Drafter, NoDrafter
from specdec.drafters.lookup import PromptLookupDrafter
from specdec.drafters.model import ModelDrafter

_OF_FAMILIES = {
    "EagleConfig": "specdec.heads.eagle",
    "EagleDrafter": "specdec.drafters.eagle",
    "EagleHead": "specdec.heads.eagle",
    "MTPConfig": "specdec.heads.mtp",
    "MTPDrafter": "specdec.drafters.mtp",
    "MTPHead": "specdec.heads.mtp",
    "MaskTokenConfig": "specdec.heads.mask_token",
    "MaskTokenDrafter": "specdec.drafters.mask_token",
    "MaskTokenHead": "specdec.heads.mask_token",
}
"""Names of families of heads, imported when they are first used."""

__all__ = ["Drafter", "ModelDrafter", "NoDrafter", "PromptLookupDrafter", *_OF_FAMILIES]


def __getattr__(name: str):
    if name in _OF_FAMILIES:
        return getattr(import_module(_OF_FAMILIES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
