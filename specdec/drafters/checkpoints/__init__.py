"""EAGLE checkpoints: every public layout read into one form, safely, and two of them written."""

from specdec.drafters.checkpoints.export import Layout, save_head
from specdec.drafters.checkpoints.reading import (
    Checkpoint,
    ReadingOptions,
    Survey,
    read_checkpoint,
    survey_checkpoint,
)

__all__ = [
    "Checkpoint",
    "Layout",
    "ReadingOptions",
    "Survey",
    "read_checkpoint",
    "save_head",
    "survey_checkpoint",
]
