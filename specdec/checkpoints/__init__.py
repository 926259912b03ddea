"""Checkpoints of learned heads: one safe reader for every family, and what writing them shares.

What a family adds (how its files are recognised and translated, and how a head is written) is in
its own module, `specdec.checkpoints.eagle` for instance.
"""

from specdec.checkpoints.family import Family, Misreading, Source, Translation
from specdec.checkpoints.survey import Checkpoint, Survey, survey_checkpoint

__all__ = [
    "Checkpoint",
    "Family",
    "Misreading",
    "Source",
    "Survey",
    "Translation",
    "survey_checkpoint",
]
