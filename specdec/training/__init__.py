"""Training: one `accelerate` loop for every drafter, and what each of them minimises.

The objectives of a family of heads are in its own module, `specdec.training.eagle` for instance.
"""

from importlib import import_module

from specdec.training.data import PackedStream, encode_texts, hold_out, read_texts
from specdec.training.loop import train
from specdec.training.losses import Distillation, NextToken
from specdec.training.plan import TrainingPlan, TrainingProgress

_OF_FAMILIES = {
    "FeatureAndToken": "specdec.training.eagle",
    "MaskRollouts": "specdec.training.mask_token",
    "MultiTokenPrediction": "specdec.training.mtp",
    "TrainingTimeTest": "specdec.training.eagle",
    "eagle_config": "specdec.training.eagle",
    "mask_token_config": "specdec.training.mask_token",
    "new_head": "specdec.training.eagle",
}
"""Names of families of heads, imported when they are first used."""

__all__ = [
    "Distillation",
    "NextToken",
    "PackedStream",
    "TrainingPlan",
    "TrainingProgress",
    "encode_texts",
    "hold_out",
    "read_texts",
    "train",
    *_OF_FAMILIES,
]


def __getattr__(name: str):
    if name in _OF_FAMILIES:
        return getattr(import_module(_OF_FAMILIES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
