"""Drafters: components that propose tokens."""

from specdec.drafters.base import Drafter, NoDrafter
from specdec.drafters.eagle import EagleDrafter
from specdec.drafters.eagle_config import EagleConfig
from specdec.drafters.eagle_head import EagleHead
from specdec.drafters.lookup import PromptLookupDrafter
from specdec.drafters.model import ModelDrafter

__all__ = [
    "Drafter",
    "EagleConfig",
    "EagleDrafter",
    "EagleHead",
    "ModelDrafter",
    "NoDrafter",
    "PromptLookupDrafter",
]
