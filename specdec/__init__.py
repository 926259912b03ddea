"""specdec: composable, provably lossless speculative decoding over Hugging Face causal language
models.
"""

from specdec import certify
from specdec.drafters import Drafter, ModelDrafter, NoDrafter, PromptLookupDrafter
from specdec.evaluation import Evaluation, evaluate
from specdec.generator import SpeculativeGenerator
from specdec.results import GenerationResult, SpeculationStats
from specdec.samplers import (
    BlockSampler,
    CouplingSampler,
    EnsembleSampler,
    RejectionSampler,
    Sampler,
    TypicalSampler,
)
from specdec.target import Target

__all__ = [
    "BlockSampler",
    "CouplingSampler",
    "Drafter",
    "EagleDrafter",
    "EnsembleSampler",
    "Evaluation",
    "GenerationResult",
    "MTPDrafter",
    "MaskTokenDrafter",
    "ModelDrafter",
    "NoDrafter",
    "PromptLookupDrafter",
    "RejectionSampler",
    "Sampler",
    "SpeculationStats",
    "SpeculativeGenerator",
    "Target",
    "TypicalSampler",
    "certify",
    "evaluate",
]


def __getattr__(name: str):
    # Families of heads are imported on first use.
    if name in ("EagleDrafter", "MTPDrafter", "MaskTokenDrafter"):
        from specdec import drafters

        return getattr(drafters, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
