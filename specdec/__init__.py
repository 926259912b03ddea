"""specdec: composable, provably lossless speculative decoding over Hugging Face causal language
models.
"""

from specdec import certify
from specdec.drafters import (
    Drafter,
    ModelDrafter,
    NoDrafter,
    NoState,
    PromptLookupDrafter,
    Proposal,
)
from specdec.evaluation import Evaluation, evaluate
from specdec.generator import SpeculativeGenerator
from specdec.request.grammar import GrammarProcessor
from specdec.results import GenerationResult, SpeculationStats
from specdec.samplers import (
    BlockSampler,
    CouplingSampler,
    Drawing,
    EnsembleSampler,
    RejectionSampler,
    Sampler,
    StepNoise,
    Stream,
    TypicalSampler,
    Warp,
)
from specdec.target import Target
from specdec.types import PAD_TOKEN, Context, Draft, Verdict

__all__ = [
    "PAD_TOKEN",
    "BlockSampler",
    "Context",
    "CouplingSampler",
    "Draft",
    "Drafter",
    "Drawing",
    "EagleDrafter",
    "EnsembleSampler",
    "Evaluation",
    "GenerationResult",
    "GrammarProcessor",
    "MTPDrafter",
    "MaskTokenDrafter",
    "ModelDrafter",
    "NoDrafter",
    "NoState",
    "PromptLookupDrafter",
    "Proposal",
    "RejectionSampler",
    "Sampler",
    "SpeculationStats",
    "SpeculativeGenerator",
    "StepNoise",
    "Stream",
    "Target",
    "TypicalSampler",
    "Verdict",
    "Warp",
    "certify",
    "evaluate",
]


def __getattr__(name: str):
    # Families of heads are imported on first use.
    if name in ("EagleDrafter", "MTPDrafter", "MaskTokenDrafter"):
        from specdec import drafters

        return getattr(drafters, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
