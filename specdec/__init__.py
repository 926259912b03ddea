"""specdec: composable, provably lossless speculative decoding over Hugging Face causal language
models.
"""

from specdec.drafters import Drafter, ModelDrafter, NoDrafter, PromptLookupDrafter
from specdec.generator import SpeculativeGenerator
from specdec.results import GenerationResult, SpeculationStats
from specdec.samplers import RejectionSampler
from specdec.target import Target

__all__ = [
    "Drafter",
    "GenerationResult",
    "ModelDrafter",
    "NoDrafter",
    "PromptLookupDrafter",
    "RejectionSampler",
    "SpeculationStats",
    "SpeculativeGenerator",
    "Target",
]
