"""Checkpoints of learned heads: one safe reader for every family, and one writer.

What a family adds (how its files are recognised, translated and refused) is in its own module,
`specdec.checkpoints.eagle` for instance.
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
