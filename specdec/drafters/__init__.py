"""Drafters: components that propose tokens."""

from importlib import import_module

from specdec.drafters.base import Drafter, NoDrafter, NoState
from specdec.drafters.join import FirstMatch
from specdec.drafters.lookup import PromptLookupDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.proposal import Proposal
from specdec.drafters.suffix import SuffixDrafter
from specdec.drafters.tree import Tree
from specdec.drafters.vocabulary import CommonVocabulary

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

__all__ = [
    "CommonVocabulary",
    "Drafter",
    "FirstMatch",
    "ModelDrafter",
    "NoDrafter",
    "NoState",
    "PromptLookupDrafter",
    "Proposal",
    "SuffixDrafter",
    "Tree",
    "drafter_named",
    *_OF_FAMILIES,
]


def drafter_named(name: str) -> Drafter:
    """The drafter of a name that the command line knows and that needs no files.

    Raises:
        ValueError: there is none; the message names the line that loads a drafter from files.

    Example:
        >>> drafter_named("lookup").num_draft_tokens
        8
    """
    if name == "none":
        return NoDrafter()
    if name == "lookup":
        return PromptLookupDrafter()
    raise ValueError(
        f"there is no drafter {name!r}; expected 'lookup', 'none', or a Drafter: "
        "ModelDrafter(model) for a draft model, EagleDrafter.from_pretrained(path, target) for a "
        "head"
    )


def __getattr__(name: str):
    if name in _OF_FAMILIES:
        return getattr(import_module(_OF_FAMILIES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
