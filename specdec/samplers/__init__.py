"""Samplers: from a draft and the target's logits to a verdict."""

from specdec.kernels import philox
from specdec.samplers.base import Sampler
from specdec.samplers.block import BlockSampler
from specdec.samplers.coupling import CouplingSampler
from specdec.samplers.ensemble import EnsembleSampler
from specdec.samplers.noise import CoupledNoise, Noise, StepNoise, Stream, ZeroNoise
from specdec.samplers.rejection import RejectionSampler
from specdec.samplers.typical import TypicalSampler
from specdec.samplers.warp import Warp

__all__ = [
    "BlockSampler",
    "CoupledNoise",
    "CouplingSampler",
    "EnsembleSampler",
    "Noise",
    "RejectionSampler",
    "Sampler",
    "StepNoise",
    "Stream",
    "TypicalSampler",
    "Warp",
    "ZeroNoise",
    "philox",
]
