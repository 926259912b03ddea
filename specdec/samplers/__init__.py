"""Samplers: from a draft and the target's logits to a verdict."""

from specdec.samplers.noise import Noise, StepNoise, Stream, ZeroNoise, philox
from specdec.samplers.rejection import RejectionSampler
from specdec.samplers.warp import Warp

__all__ = ["Noise", "RejectionSampler", "StepNoise", "Stream", "Warp", "ZeroNoise", "philox"]
