"""Training: one `accelerate` loop for every drafter, and what each of them minimises."""

from specdec.training.data import PackedStream, encode_texts, read_texts
from specdec.training.eagle import FeatureAndToken, TrainingTimeTest
from specdec.training.evaluation import measure_acceptance
from specdec.training.heads import eagle_config, new_head
from specdec.training.loop import train
from specdec.training.objectives import Distillation, NextToken
from specdec.training.plan import TrainingPlan, TrainingProgress

__all__ = [
    "Distillation",
    "FeatureAndToken",
    "NextToken",
    "PackedStream",
    "TrainingPlan",
    "TrainingProgress",
    "TrainingTimeTest",
    "eagle_config",
    "encode_texts",
    "measure_acceptance",
    "new_head",
    "read_texts",
    "train",
]
