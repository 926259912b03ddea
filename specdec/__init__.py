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
    if name == "EagleDrafter":  # a family of heads is imported when it is first used
        from specdec.drafters.eagle import EagleDrafter

        return EagleDrafter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
