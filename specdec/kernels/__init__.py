"""The operations that the rest of the library calls, one folder each; see README.md.

In a folder `reference.py` is the definition in plain PyTorch, with the documentation, `triton.py`
the same on a GPU, and `__init__.py` chooses between the two.
"""

from specdec.kernels.attention import attends_raggedly, ragged_attention
from specdec.kernels.attention.reference import CAUSAL, AttentionOptions
from specdec.kernels.mask_window import expand_window
from specdec.kernels.mask_window.reference import MaskWindow, WindowSpec
from specdec.kernels.mtp_shift import shift_window
from specdec.kernels.mtp_shift.reference import PastRows, ShiftedWindow
from specdec.kernels.philox import step_uniforms
from specdec.kernels.philox.reference import philox
from specdec.kernels.race import race
from specdec.kernels.race.reference import first_arrival
from specdec.kernels.sample import sample, sample_tokens
from specdec.kernels.sample.reference import draw
from specdec.kernels.truncate import find_cutoff, warp_probs
from specdec.kernels.truncate.reference import Cutoff, Truncation, WarpParams
from specdec.kernels.verify import verify
from specdec.kernels.verify.reference import (
    VerifyUniforms,
    append_token,
    find_faults,
    token_rule,
    verify_points,
)
from specdec.kernels.verify.tree import (
    longest_path,
    rows_of,
    verdict_of,
    verify_tree,
    verify_tree_points,
)
from specdec.kernels.write_slots import write_slots, writes_slots

__all__ = [
    "CAUSAL",
    "AttentionOptions",
    "Cutoff",
    "MaskWindow",
    "PastRows",
    "ShiftedWindow",
    "Truncation",
    "VerifyUniforms",
    "WarpParams",
    "WindowSpec",
    "append_token",
    "attends_raggedly",
    "draw",
    "expand_window",
    "find_cutoff",
    "find_faults",
    "first_arrival",
    "longest_path",
    "philox",
    "race",
    "ragged_attention",
    "rows_of",
    "sample",
    "sample_tokens",
    "shift_window",
    "step_uniforms",
    "token_rule",
    "verdict_of",
    "verify",
    "verify_points",
    "verify_tree",
    "verify_tree_points",
    "warp_probs",
    "write_slots",
    "writes_slots",
]
