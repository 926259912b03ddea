"""specdec: composable speculative decoding over Hugging Face causal language models, with provably
lossless rules.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from specdec.drafters import files

if TYPE_CHECKING:
    from specdec.drafters.assistant import AssistantDrafter
    from specdec.drafters.base import Drafter
    from specdec.drafters.eagle import EagleDrafter
    from specdec.drafters.join import ExtendedDrafter, FirstMatch
    from specdec.drafters.lookahead import LookaheadDrafter
    from specdec.drafters.lookup import PromptLookupDrafter
    from specdec.drafters.mask_token.drafter import MaskTokenDrafter
    from specdec.drafters.medusa import MedusaDrafter
    from specdec.drafters.model import ModelDrafter
    from specdec.drafters.mtp.drafter import MTPDrafter
    from specdec.drafters.plain import NoDrafter
    from specdec.drafters.proposal import Proposal
    from specdec.drafters.self_draft import SelfDrafter
    from specdec.drafters.source_lookup import SourceLookupDrafter
    from specdec.drafters.strings import StringDrafter
    from specdec.drafters.suffix import SuffixDrafter
    from specdec.drafters.tree import Tree
    from specdec.drafters.uno import UnoDrafter
    from specdec.drafters.verified import Verified
    from specdec.drafters.visible import Recent, Sinks, TopSlots
    from specdec.drafters.wrapped import WrappedDrafter
    from specdec.generator import SpeculativeGenerator
    from specdec.lab.certificates import certify
    from specdec.lab.evaluation.evaluate import evaluate
    from specdec.lab.evaluation.evaluation import Evaluation
    from specdec.request import GenerateOptions
    from specdec.request.grammar import GrammarProcessor
    from specdec.results import GenerationResult
    from specdec.samplers.base import Sampler
    from specdec.samplers.block import BlockSampler
    from specdec.samplers.coupling import CouplingSampler
    from specdec.samplers.logits_filter import LogitsFilter
    from specdec.samplers.lossy import EnsembleSampler, TypicalSampler
    from specdec.samplers.noise import Drawing, Noise, StepNoise, Stream
    from specdec.samplers.rejection import RejectionSampler
    from specdec.statistics import SpeculationStats
    from specdec.targets import Target
    from specdec.types import Context, Draft, Verdict

__version__ = "0.1.0"
"""Of this package: pyproject.toml reads it here."""

__all__ = [
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
    "ExtendedDrafter",
    "FirstMatch",
    "GenerateOptions",
    "GenerationResult",
    "GrammarProcessor",
    "LogitsFilter",
    "LookaheadDrafter",
    "MTPDrafter",
    "MaskTokenDrafter",
    "MedusaDrafter",
    "ModelDrafter",
    "NoDrafter",
    "Noise",
    "PromptLookupDrafter",
    "Proposal",
    "Recent",
    "RejectionSampler",
    "Sampler",
    "SelfDrafter",
    "Sinks",
    "SourceLookupDrafter",
    "SpeculationStats",
    "SpeculativeGenerator",
    "StepNoise",
    "Stream",
    "StringDrafter",
    "SuffixDrafter",
    "Target",
    "TopSlots",
    "Tree",
    "TypicalSampler",
    "UnoDrafter",
    "Verdict",
    "Verified",
    "WrappedDrafter",
    "certify",
    "evaluate",
]

_HOMES = {
    "drafters.assistant": "AssistantDrafter",
    "drafters.base": "Drafter",
    "drafters.plain": "NoDrafter",
    "drafters.eagle": "EagleDrafter",
    "drafters.join": "ExtendedDrafter FirstMatch",
    "drafters.lookahead": "LookaheadDrafter",
    "drafters.lookup": "PromptLookupDrafter",
    "drafters.mask_token.drafter": "MaskTokenDrafter",
    "drafters.model": "ModelDrafter",
    "drafters.medusa": "MedusaDrafter",
    "drafters.mtp.drafter": "MTPDrafter",
    "drafters.proposal": "Proposal",
    "drafters.self_draft": "SelfDrafter",
    "drafters.source_lookup": "SourceLookupDrafter",
    "drafters.strings": "StringDrafter",
    "drafters.suffix": "SuffixDrafter",
    "drafters.tree": "Tree",
    "drafters.uno": "UnoDrafter",
    "drafters.verified": "Verified",
    "drafters.visible": "Recent Sinks TopSlots",
    "drafters.wrapped": "WrappedDrafter",
    "generator": "SpeculativeGenerator",
    "lab.certificates": "certify",
    "lab.evaluation": "Evaluation evaluate",
    "request": "GenerateOptions",
    "request.grammar": "GrammarProcessor",
    "results": "GenerationResult",
    "samplers.base": "Sampler",
    "samplers.block": "BlockSampler",
    "samplers.coupling": "CouplingSampler",
    "samplers.lossy": "EnsembleSampler TypicalSampler",
    "samplers.noise": "Drawing Noise StepNoise Stream",
    "samplers.rejection": "RejectionSampler",
    "samplers.logits_filter": "LogitsFilter",
    "statistics": "SpeculationStats",
    "targets": "Target",
    "types": "Context Draft Verdict",
}
"""Modules that define the names, as type checkers see them above."""


files.checkpoints = lambda name: import_module(f"specdec.checkpoints.{name}")


def __getattr__(name: str):
    # On first use: torch and transformers take seconds, for which `specdec --help` need not wait.
    # `from specdec import zoo`; first in the lab: older versions may have left an empty folder.
    for room in (f"specdec.lab.{name}", f"specdec.{name}"):
        if find_spec(room):
            return import_module(room)
    for home, names in _HOMES.items():
        if name in names.split():
            globals()[name] = getattr(import_module(f"specdec.{home}"), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
