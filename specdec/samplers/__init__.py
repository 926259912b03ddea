"""Samplers: from a draft and the target's logits to a verdict."""

from specdec.arguments import check_choice
from specdec.kernels import philox
from specdec.samplers.base import Sampler
from specdec.samplers.block import BlockSampler
from specdec.samplers.coupling import CouplingSampler
from specdec.samplers.drawing import Drawing, draw_by_inversion, draw_by_race
from specdec.samplers.ensemble import EnsembleSampler
from specdec.samplers.noise import Noise, ScriptedNoise, StepNoise, Stream
from specdec.samplers.rejection import RejectionSampler
from specdec.samplers.typical import TypicalSampler
from specdec.samplers.warp import Warp

SAMPLERS: dict[str, type[Sampler]] = {
    "auto": BlockSampler,
    "block": BlockSampler,
    "rejection": RejectionSampler,
    "coupling": CouplingSampler,
    "typical": TypicalSampler,
}
"""Samplers that need no arguments, by the names of the command line."""


def sampler_named(name: str) -> Sampler:
    """The sampler of a name that the command line knows.

    Raises:
        ValueError: there is none, or it needs arguments.

    Example:
        >>> sampler_named("rejection")
        RejectionSampler()
    """
    if name == "ensemble":
        raise ValueError("the ensemble sampler needs a weight: pass EnsembleSampler(0.9)")
    return SAMPLERS[check_choice("sampler", name, SAMPLERS, advice="or pass a Sampler")]()


__all__ = [
    "BlockSampler",
    "CouplingSampler",
    "Drawing",
    "EnsembleSampler",
    "Noise",
    "RejectionSampler",
    "Sampler",
    "ScriptedNoise",
    "StepNoise",
    "Stream",
    "TypicalSampler",
    "Warp",
    "draw_by_inversion",
    "draw_by_race",
    "philox",
    "sampler_named",
]
