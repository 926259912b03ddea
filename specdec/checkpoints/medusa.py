"""Medusa checkpoints of both public layouts."""

from __future__ import annotations

from specdec.checkpoints.feature_heads import family_of_layouts
from specdec.checkpoints.medusa_layouts import LAYOUTS
from specdec.drafters.medusa import MedusaDrafter, MedusaHead

MEDUSA = family_of_layouts(
    "Medusa",
    LAYOUTS,
    MedusaDrafter,
    MedusaHead,
    marks="keys medusa_num_heads, or model_type 'medusa'",
    files=("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
)
"""Medusa heads; the producer is `"FasterDecoding"` or `"vLLM"`."""
