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
    from specdec.drafters.head import HeadDrafter
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
    "head_drafters",
]


def head_drafters() -> dict[str, type[HeadDrafter]]:
    """The drafters of all families of heads that are read, by the kinds in names of drafters
    (`eagle:PATH`).

    Example:
        >>> list(head_drafters())
        ['eagle', 'mask-token', 'mtp', 'assistant']
    """
    kinds = {"eagle": "EagleDrafter", "mask-token": "MaskTokenDrafter", "mtp": "MTPDrafter"}
    kinds |= {"assistant": "AssistantDrafter"}
    return {kind: __getattr__(name) for kind, name in kinds.items()}


def __getattr__(name: str):
    if name in _OF_FAMILIES:
        return getattr(import_module(_OF_FAMILIES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
