"""Mask-token checkpoints of every public layout: P-EAGLE, PARD, DFlash and its successors."""

from __future__ import annotations

from typing import get_args

from specdec.checkpoints.feature_heads import family_of_layouts
from specdec.checkpoints.layer_ids import CONVENTIONS
from specdec.checkpoints.mask_layouts import MASKS, MASKS_OF_SPECULATORS
from specdec.drafters.mask_token.drafter import MaskTokenDrafter
from specdec.drafters.mask_token.head import Alignment, MaskTokenHead

MASK_TOKEN = family_of_layouts(
    "mask token",
    (*MASKS_OF_SPECULATORS, *MASKS),
    MaskTokenDrafter,
    MaskTokenHead,
    marks="keys ptd_token_id, pard_token, dflash_config, or tensor mask_hidden",
    options={
        "mask_token_id": (),
        "alignment": get_args(Alignment),
        "is_causal": (True, False),
        "layer_convention": CONVENTIONS,
        "feature_layers": (),
        "rope_theta": (),
        "layer": (),
        "norm_before_residual": (True, False),
    },
)
"""P-EAGLE, PARD and DFlash. The producer is `"speculators"`, `"amazon"`, `"SpecForge"`, `"AMD"`,
`"z-lab"`, `"NVIDIA"`, `"TorchSpec"`, `"Hugging Face"` or `"DeepSpec"`. The kind is the design by
its name in papers.

The options are what a caller may know better than a checkpoint's configuration says.
`mask_token_id`: of the masks, where the configuration names none or another. `alignment` and
`is_causal`: as in `MaskTokenConfig`. The others are as in `specdec.checkpoints.eagle.EAGLE`.
"""
