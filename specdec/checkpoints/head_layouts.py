"""All layouts of EAGLE and mask-token heads, and those that are written."""

from __future__ import annotations

from specdec.checkpoints.eagle_layouts import EAGLES, SAFEAILAB_EAGLE1, SPECFORGE, SPECULATORS
from specdec.checkpoints.mask_layouts import (
    AMAZON,
    DFLASH,
    MASKS,
    MASKS_OF_SPECULATORS,
    PARD,
    SPECULATORS_DFLASH,
    SPECULATORS_DFLASH2,
    SPECULATORS_DSPARK,
    SPECULATORS_P_EAGLE,
    SPECULATORS_XPRESS,
)
from specdec.checkpoints.medusa_layouts import VLLM as VLLM_MEDUSA

LAYOUTS = (*EAGLES, *MASKS_OF_SPECULATORS, *MASKS)

WRITTEN = (
    SPECFORGE,  # vLLM and SafeAILab's own code: tests/foreign/test_vllm.py, test_safeailab.py
    SAFEAILAB_EAGLE1,  # vLLM: tests/foreign/test_vllm.py
    SPECULATORS,  # vLLM, and the speculators package: checkpoints/test_speculators_package.py
    SPECULATORS_P_EAGLE,  # vLLM
    AMAZON,  # vLLM
    PARD,  # vLLM; transformers: checkpoints/test_head_export.py
    DFLASH,  # vLLM
    SPECULATORS_DFLASH,  # vLLM
    SPECULATORS_DSPARK,  # the speculators package: tests/foreign/test_block_heads.py
    SPECULATORS_DFLASH2,  # the same
    SPECULATORS_XPRESS,  # the same
    VLLM_MEDUSA,  # vLLM: tests/foreign/test_vllm.py
)
"""Layouts that are written, the usual ones first, each with the engine that a test of this
repository reads such files with. No other is written: a file that an engine misreads is worse than
none.
"""
