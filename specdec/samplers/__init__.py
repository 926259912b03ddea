"""Samplers: from a draft and the target's logits to a verdict."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.samplers.base import Sampler as Sampler
    from specdec.samplers.block import BlockSampler as BlockSampler
    from specdec.samplers.coupling import CouplingSampler as CouplingSampler
    from specdec.samplers.logits_filter import LogitsFilter as LogitsFilter
    from specdec.samplers.lossy import (
        EnsembleSampler as EnsembleSampler,
        TypicalSampler as TypicalSampler,
    )
    from specdec.samplers.noise import (
        Drawing as Drawing,
        Noise as Noise,
        StepNoise as StepNoise,
        Stream as Stream,
        draw_by_inversion as draw_by_inversion,
    )
    from specdec.samplers.paths import GBVSampler, SpecTrSampler
    from specdec.samplers.races import draw_by_race as draw_by_race
    from specdec.samplers.rejection import RejectionSampler as RejectionSampler
    from specdec.samplers.scripted import ScriptedNoise as ScriptedNoise

_HOMES = {
    "specdec.samplers.base": "Sampler",
    "specdec.samplers.block": "BlockSampler",
    "specdec.samplers.coupling": "CouplingSampler",
    "specdec.samplers.lossy": "EnsembleSampler TypicalSampler",
    "specdec.samplers.noise": "Drawing Noise StepNoise Stream draw_by_inversion",
    "specdec.samplers.paths": "GBVSampler SpecTrSampler",
    "specdec.samplers.races": "draw_by_race",
    "specdec.samplers.rejection": "RejectionSampler",
    "specdec.samplers.scripted": "ScriptedNoise",
    "specdec.samplers.logits_filter": "LogitsFilter",
}
"""Modules that define the names, which are imported on their first use."""

__all__ = [
    "GBVSampler",
    "SpecTrSampler",
]


def __getattr__(name: str):
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
