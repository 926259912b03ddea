"""specdec: composable, provably lossless speculative decoding over Hugging Face causal language
models.
"""

from specdec import certify
from specdec.drafters import Drafter, EagleDrafter, ModelDrafter, NoDrafter, PromptLookupDrafter
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
]
