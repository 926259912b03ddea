"""Training: HF's `Trainer` for every drafter, and what each of them minimises."""

from importlib import import_module

_HOMES = {
    "blocks": ["BlockRollouts"],
    "callbacks": ["AcceptanceCallback", "MemoryCallback", "SentinelCallback"],
    "data": ["PackedStream", "beginning_of", "encode_texts"],
    "eagle": ["FeatureAndToken", "TrainingTimeTest", "new_head"],
    "follow": ["FollowTarget"],
    "losses": ["Distillation", "NextToken"],
    "mask_token": ["MaskRollouts"],
    "medusa": ["EveryHead"],
    "mtp": ["MultiTokenPrediction"],
    "trainer": ["ObjectiveArguments", "ObjectiveTrainer"],
}
"""The names of each module, imported on first use: a family of heads loads no other."""

__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str):
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"specdec.lab.training.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
