"""specdec: composable speculative decoding over Hugging Face causal language models, with provably
lossless rules.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.certify import certify
    from specdec.drafters import (
        AssistantDrafter,
        Drafter,
        EagleDrafter,
        FirstMatch,
        MaskTokenDrafter,
        ModelDrafter,
        MTPDrafter,
        NoDrafter,
        PromptLookupDrafter,
        Proposal,
        Recent,
        SelfDrafter,
        Sinks,
        SuffixDrafter,
        TopSlots,
        Tree,
    )
    from specdec.evaluation import Evaluation, evaluate
    from specdec.generator import SpeculativeGenerator
    from specdec.request import GenerateOptions
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
    "AssistantDrafter",
    "BlockSampler",
    "Context",
    "CouplingSampler",
    "Draft",
    "Drafter",
    "Drawing",
    "EagleDrafter",
    "EnsembleSampler",
    "Evaluation",
    "FirstMatch",
    "GenerateOptions",
    "GenerationResult",
    "GrammarProcessor",
    "MTPDrafter",
    "MaskTokenDrafter",
    "ModelDrafter",
    "NoDrafter",
    "PromptLookupDrafter",
    "Proposal",
    "Recent",
    "RejectionSampler",
    "Sampler",
    "SelfDrafter",
    "Sinks",
    "SpeculationStats",
    "SpeculativeGenerator",
    "StepNoise",
    "Stream",
    "SuffixDrafter",
    "Target",
    "TopSlots",
    "Tree",
    "TypicalSampler",
    "Verdict",
    "Warp",
    "certify",
    "evaluate",
]

_HOMES = (
    *("types", "results", "samplers", "target", "drafters", "request", "request.grammar"),
    *("generator", "evaluation"),
)
"""Rooms that define the names, from the ground up."""


def __getattr__(name: str):
    # On first use: torch and transformers take seconds, for which `specdec --help` need not wait.
    if find_spec(f"specdec.{name}"):
        return import_module(f"specdec.{name}")
    for home in _HOMES if name in __all__ else ():
        module = import_module(f"specdec.{home}")
        if hasattr(module, name):
            globals()[name] = getattr(module, name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
