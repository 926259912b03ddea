"""Checkpoints of learned heads: one safe reader for every family, and one writer.

How the files of a family are recognised and translated, and which of them are not supported, is
in the family's own module, `specdec.checkpoints.eagle` for instance.
"""

from specdec.checkpoints.drafter import load
from specdec.checkpoints.family import Family, Source, Translation
from specdec.checkpoints.layout import Key, Layout
from specdec.checkpoints.survey import survey_checkpoint

__all__ = [
    "Family",
    "Key",
    "Layout",
    "Source",
    "Translation",
    "load",
    "survey_checkpoint",
]
