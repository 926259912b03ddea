"""Medusa checkpoints of both public layouts."""

from __future__ import annotations

from specdec.checkpoints.family import Family, Source, recognise
from specdec.checkpoints.feature_heads import translate
from specdec.checkpoints.files import CheckpointFolder
from specdec.checkpoints.medusa_layouts import LAYOUTS
from specdec.drafters.medusa import MedusaConfig, MedusaDrafter, MedusaHead


def detect(folder: CheckpointFolder) -> Source | None:
    """The producer: `"FasterDecoding"` or `"vLLM"`."""
    return recognise(folder, LAYOUTS)


MEDUSA = Family(
    name="Medusa",
    marks="keys medusa_num_heads, or model_type 'medusa'",
    detect=detect,
    translate=translate,
    drafter=MedusaDrafter,
    head=MedusaHead,
    config=MedusaConfig,
    files=("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
)
"""Medusa heads."""
