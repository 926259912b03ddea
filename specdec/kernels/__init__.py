"""The operations that the rest of the library calls, one folder each; see README.md.

In a folder `reference.py` is the operation: its documentation, the `if` that hands it to a GPU, and
its definition in plain PyTorch. `triton.py` is the same on a GPU.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from specdec.kernels.race.reference import race
from specdec.kernels.sample.reference import draw, sample
from specdec.kernels.truncate.reference import filtered_probs
from specdec.kernels.types import AttentionOptions, FilterParams
from specdec.kernels.verify.verdict import verify  # not on first use: its folder has the same name

if TYPE_CHECKING:
    from specdec.kernels.attention.reference import ragged_attention
    from specdec.kernels.slots.reference import write_slots
    from specdec.kernels.verify.reference import append_token

_HOMES = {
    "specdec.kernels.attention.reference": "ragged_attention",
    "specdec.kernels.slots.reference": "write_slots",
    "specdec.kernels.verify.reference": "append_token",
}
"""Modules of names that are imported on their first use: samplers need none of them."""

__all__ = [
    "AttentionOptions",
    "FilterParams",
    "append_token",
    "draw",
    "filtered_probs",
    "race",
    "ragged_attention",
    "sample",
    "verify",
    "write_slots",
]


def __getattr__(name: str):
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
