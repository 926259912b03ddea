"""Drafters: components that propose tokens."""

from specdec.drafters.base import Drafter, NoDrafter
from specdec.drafters.lookup import PromptLookupDrafter
from specdec.drafters.model import ModelDrafter

__all__ = ["Drafter", "ModelDrafter", "NoDrafter", "PromptLookupDrafter"]
