"""Drafters: components that propose tokens."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.drafters.assistant import (
        AssistantConfig as AssistantConfig,
        AssistantDrafter as AssistantDrafter,
        AssistantHead as AssistantHead,
    )
    from specdec.drafters.base import Drafter as Drafter
    from specdec.drafters.plain import NoDrafter as NoDrafter
    from specdec.drafters.eagle import EagleDrafter as EagleDrafter, EagleHead
    from specdec.drafters.eagle_config import EagleConfig
    from specdec.drafters.join import ExtendedDrafter as ExtendedDrafter, FirstMatch as FirstMatch
    from specdec.drafters.lookahead import LookaheadDrafter as LookaheadDrafter
    from specdec.drafters.lookup import PromptLookupDrafter as PromptLookupDrafter
    from specdec.drafters.source_lookup import SourceLookupDrafter as SourceLookupDrafter
    from specdec.drafters.mask_token.drafter import MaskTokenDrafter as MaskTokenDrafter
    from specdec.drafters.mask_token.head import MaskTokenConfig, MaskTokenHead
    from specdec.drafters.medusa import MedusaConfig, MedusaDrafter as MedusaDrafter, MedusaHead
    from specdec.drafters.model import ModelDrafter as ModelDrafter
    from specdec.drafters.mtp.drafter import MTPDrafter as MTPDrafter
    from specdec.drafters.mtp.head import MTPConfig, MTPHead
    from specdec.drafters.paths import Paths
    from specdec.drafters.proposal import Proposal as Proposal
    from specdec.drafters.self_draft import SelfDrafter as SelfDrafter
    from specdec.drafters.strings import StringDrafter as StringDrafter
    from specdec.drafters.suffix import SuffixDrafter as SuffixDrafter
    from specdec.drafters.tree import Tree as Tree
    from specdec.drafters.uno import UnoDrafter as UnoDrafter
    from specdec.drafters.visible import (
        Recent as Recent,
        Sinks as Sinks,
        TopSlots as TopSlots,
        Visible as Visible,
    )
    from specdec.drafters.vocabulary import CommonVocabulary
    from specdec.drafters.wrapped import WrappedDrafter as WrappedDrafter

_HOMES = {
    "specdec.drafters.assistant": "AssistantConfig AssistantDrafter AssistantHead",
    "specdec.drafters.base": "Drafter",
    "specdec.drafters.plain": "NoDrafter",
    "specdec.drafters.eagle": "EagleDrafter EagleHead",
    "specdec.drafters.eagle_config": "EagleConfig",
    "specdec.drafters.join": "ExtendedDrafter FirstMatch",
    "specdec.drafters.lookahead": "LookaheadDrafter",
    "specdec.drafters.lookup": "PromptLookupDrafter",
    "specdec.drafters.source_lookup": "SourceLookupDrafter",
    "specdec.drafters.mask_token.drafter": "MaskTokenDrafter",
    "specdec.drafters.medusa": "MedusaConfig MedusaDrafter MedusaHead",
    "specdec.drafters.model": "ModelDrafter",
    "specdec.drafters.mtp.drafter": "MTPDrafter",
    "specdec.drafters.paths": "Paths",
    "specdec.drafters.proposal": "Proposal",
    "specdec.drafters.self_draft": "SelfDrafter",
    "specdec.drafters.strings": "StringDrafter",
    "specdec.drafters.suffix": "SuffixDrafter",
    "specdec.drafters.tree": "Tree",
    "specdec.drafters.uno": "UnoDrafter",
    "specdec.drafters.visible": "Recent Sinks TopSlots Visible",
    "specdec.drafters.vocabulary": "CommonVocabulary",
    "specdec.drafters.wrapped": "WrappedDrafter",
    "specdec.drafters.mask_token.head": "MaskTokenConfig MaskTokenHead",
    "specdec.drafters.mtp.head": "MTPConfig MTPHead",
}
"""Modules that define the names, which are imported on their first use."""

__all__ = [
    "CommonVocabulary",
    "EagleConfig",
    "EagleHead",
    "MTPConfig",
    "MTPHead",
    "MaskTokenConfig",
    "MaskTokenHead",
    "MedusaConfig",
    "MedusaHead",
    "Paths",
]


def __getattr__(name: str):
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
