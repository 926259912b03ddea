"""Training: HF's `Trainer` for every drafter, and what each of them minimises."""

from importlib import import_module

_HOMES = {
    "AcceptanceCallback": "callbacks",
    "Distillation": "losses",
    "FeatureAndToken": "eagle",
    "MaskRollouts": "mask_token",
    "MultiTokenPrediction": "mtp",
    "NextToken": "losses",
    "ObjectiveArguments": "trainer",
    "ObjectiveTrainer": "trainer",
    "PackedStream": "data",
    "TrainingTimeTest": "eagle",
    "eagle_config": "eagle",
    "encode_texts": "data",
    "hold_out": "data",
    "mask_token_config": "mask_token",
    "new_head": "eagle",
    "read_texts": "data",
}
"""The module of each name, imported on first use: a family of heads loads no other."""

__all__ = list(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(import_module(f"specdec.training.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
