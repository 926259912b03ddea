"""The operations that the rest of the library calls, one folder each; see README.md.

In a folder `reference.py` is the operation: its documentation, the `if` that hands it to a GPU, and
its definition in plain PyTorch. `triton.py` is the same on a GPU.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from specdec.kernels.philox.reference import named_uniforms, philox, step_uniforms
from specdec.kernels.race.reference import exponentials, first_arrival, race
from specdec.kernels.sample.reference import draw, sample, sample_tokens
from specdec.kernels.truncate.reference import filtered_logits, filtered_probs, find_cutoff
from specdec.kernels.types import (
    CAUSAL,
    AttentionOptions,
    Cutoff,
    FilterParams,
    Truncation,
    VerifyUniforms,
)
from specdec.kernels.verify.reference import append_token, take_rows, token_rule
from specdec.kernels.verify.tree import longest_path, verdict_of, verify_tree
from specdec.kernels.verify.verdict import verify, verify_points, verify_probs

if TYPE_CHECKING:
    from specdec.kernels.attention.reference import attends_raggedly, ragged_attention
    from specdec.kernels.linear.reference import scaled_linear
    from specdec.kernels.slots.reference import write_slots, writes_slots
    from specdec.kernels.verify.paths import (
        PathDraft,
        verify_greedy_path,
        verify_sequential_paths,
    )

_HOMES = {
    "specdec.kernels.attention.reference": "attends_raggedly ragged_attention",
    "specdec.kernels.linear.reference": "scaled_linear",
    "specdec.kernels.slots.reference": "write_slots writes_slots",
    "specdec.kernels.verify.paths": "PathDraft verify_greedy_path verify_sequential_paths",
}
"""Modules of names that are imported on their first use: samplers need none of them."""

__all__ = [
    "CAUSAL",
    "AttentionOptions",
    "Cutoff",
    "FilterParams",
    "PathDraft",
    "Truncation",
    "VerifyUniforms",
    "append_token",
    "attends_raggedly",
    "draw",
    "exponentials",
    "filtered_logits",
    "filtered_probs",
    "find_cutoff",
    "first_arrival",
    "longest_path",
    "named_uniforms",
    "philox",
    "race",
    "ragged_attention",
    "sample",
    "sample_tokens",
    "scaled_linear",
    "step_uniforms",
    "take_rows",
    "token_rule",
    "verdict_of",
    "verify",
    "verify_greedy_path",
    "verify_points",
    "verify_probs",
    "verify_sequential_paths",
    "verify_tree",
    "write_slots",
    "writes_slots",
]


def __getattr__(name: str):
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
