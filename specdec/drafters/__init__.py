"""Drafters: components that propose tokens."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from specdec.drafters.base import Drafter, NoDrafter
from specdec.drafters.join import FirstMatch
from specdec.drafters.lookup import PromptLookupDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.proposal import Proposal
from specdec.drafters.self_draft import SelfDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.drafters.tree import Tree
from specdec.drafters.visible import Recent, Sinks, TopSlots, Visible
from specdec.drafters.vocabulary import CommonVocabulary

if TYPE_CHECKING:
    from specdec.drafters.assistant import AssistantDrafter
    from specdec.drafters.eagle import EagleDrafter
    from specdec.drafters.mask_token import MaskTokenDrafter
    from specdec.drafters.mtp import MTPDrafter
    from specdec.heads.assistant import AssistantConfig, AssistantHead
    from specdec.heads.eagle import EagleConfig, EagleHead
    from specdec.heads.mask_token import MaskTokenConfig, MaskTokenHead
    from specdec.heads.mtp import MTPConfig, MTPHead

_OF_FAMILIES = {
    "AssistantConfig": "specdec.heads.assistant",
    "AssistantDrafter": "specdec.drafters.assistant",
    "AssistantHead": "specdec.heads.assistant",
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

__all__ = [
    "AssistantConfig",
    "AssistantDrafter",
    "AssistantHead",
    "CommonVocabulary",
    "Drafter",
    "EagleConfig",
    "EagleDrafter",
    "EagleHead",
    "FirstMatch",
    "MTPConfig",
    "MTPDrafter",
    "MTPHead",
    "MaskTokenConfig",
    "MaskTokenDrafter",
    "MaskTokenHead",
    "ModelDrafter",
    "NoDrafter",
    "PromptLookupDrafter",
    "Proposal",
    "Recent",
    "SelfDrafter",
    "Sinks",
    "SuffixDrafter",
    "TopSlots",
    "Tree",
    "Visible",
]


def __getattr__(name: str):
    if name in _OF_FAMILIES:
        return getattr(import_module(_OF_FAMILIES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
