"""Drafters: components that propose tokens."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.drafters.assistant import AssistantDrafter
    from specdec.drafters.base import Drafter, NoDrafter
    from specdec.drafters.eagle import EagleDrafter
    from specdec.drafters.join import FirstMatch
    from specdec.drafters.lookup import PromptLookupDrafter
    from specdec.drafters.mask_token import MaskTokenDrafter
    from specdec.drafters.model import ModelDrafter
    from specdec.drafters.mtp import MTPDrafter
    from specdec.drafters.proposal import Proposal
    from specdec.drafters.self_draft import SelfDrafter
    from specdec.drafters.suffix import SuffixDrafter
    from specdec.drafters.tree import Tree
    from specdec.drafters.visible import Recent, Sinks, TopSlots, Visible
    from specdec.drafters.vocabulary import CommonVocabulary
    from specdec.heads.assistant import AssistantConfig, AssistantHead
    from specdec.heads.eagle import EagleConfig, EagleHead
    from specdec.heads.mask_token import MaskTokenConfig, MaskTokenHead
    from specdec.heads.mtp import MTPConfig, MTPHead

_HOMES = {
    "specdec.drafters.assistant": "AssistantDrafter",
    "specdec.drafters.base": "Drafter NoDrafter",
    "specdec.drafters.eagle": "EagleDrafter",
    "specdec.drafters.join": "FirstMatch",
    "specdec.drafters.lookup": "PromptLookupDrafter",
    "specdec.drafters.mask_token": "MaskTokenDrafter",
    "specdec.drafters.model": "ModelDrafter",
    "specdec.drafters.mtp": "MTPDrafter",
    "specdec.drafters.proposal": "Proposal",
    "specdec.drafters.self_draft": "SelfDrafter",
    "specdec.drafters.suffix": "SuffixDrafter",
    "specdec.drafters.tree": "Tree",
    "specdec.drafters.visible": "Recent Sinks TopSlots Visible",
    "specdec.drafters.vocabulary": "CommonVocabulary",
    "specdec.heads.assistant": "AssistantConfig AssistantHead",
    "specdec.heads.eagle": "EagleConfig EagleHead",
    "specdec.heads.mask_token": "MaskTokenConfig MaskTokenHead",
    "specdec.heads.mtp": "MTPConfig MTPHead",
}
"""Modules that define the names, which are imported on their first use."""

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
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
