"""Samplers: from a draft and the target's logits to a verdict."""

from specdec.kernels import philox
from specdec.samplers.base import Sampler
from specdec.samplers.block import BlockSampler
from specdec.samplers.coupling import CouplingSampler
from specdec.samplers.ensemble import EnsembleSampler
from specdec.samplers.noise import (
    Drawing,
    Noise,
    ScriptedNoise,
    StepNoise,
    Stream,
    draw_by_inversion,
    draw_by_race,
)
from specdec.samplers.paths import GBVSampler, SpecTrSampler
from specdec.samplers.rejection import RejectionSampler
from specdec.samplers.typical import TypicalSampler
from specdec.samplers.warp import Warp

SAMPLERS: dict[str, type[Sampler]] = {
    "auto": BlockSampler,
    "block": BlockSampler,
    "rejection": RejectionSampler,
    "coupling": CouplingSampler,
    "gbv": GBVSampler,
    "spectr": SpecTrSampler,
    "typical": TypicalSampler,
    "ensemble": EnsembleSampler,
}
"""Samplers by name; the last needs a weight."""

__all__ = [
    "BlockSampler",
    "CouplingSampler",
    "Drawing",
    "EnsembleSampler",
    "GBVSampler",
    "Noise",
    "RejectionSampler",
    "Sampler",
    "ScriptedNoise",
    "SpecTrSampler",
    "StepNoise",
    "Stream",
    "TypicalSampler",
    "Warp",
    "draw_by_inversion",
    "draw_by_race",
    "philox",
]
