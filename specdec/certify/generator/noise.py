"""Whether a generation ever uses a random number twice."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.generator import SpeculativeGenerator
from specdec.request import Sampling
from specdec.request.prompts import left_padded
from specdec.samplers import StepNoise, Stream


@dataclass(frozen=True)
class NoiseAudit:
    """The uniforms of a generation, whose rows have different seeds."""

    num_draws: int  # over all rows, streams and steps
    num_repeated: int  # equal to an earlier one
    num_outside: int  # not in [0, 1)

    @property
    def passed(self) -> bool:
        """All draws are different, and in range."""
        return self.num_repeated == self.num_outside == 0

    @property
    def false_alarm(self) -> float:
        """Chance that independent draws of 52 bits repeat."""
        return self.num_draws * (self.num_draws - 1) / 2 * 2.0**-52

    def __str__(self) -> str:
        outside = f", {self.num_outside} outside [0, 1)" if self.num_outside else ""
        return (
            f"noise: {self.num_draws} draws, {self.num_repeated} used before{outside} "
            f"(false alarm {self.false_alarm:.0e})"
        )


@torch.inference_mode()
def audit_noise(
    generator: SpeculativeGenerator, prompts: list[list[int]], num: int, sampling: Sampling
) -> NoiseAudit:
    """Generates `num` tokens per prompt with a sampler that accepts and resamples by uniforms, and
    looks at every uniform of every step. The numbers of the prompts are the seeds.
    """

    class RecordingNoise(generator.sampler.noise_type):
        """Keeps the uniforms `[B, streams, K + 1]` of the last step; a captured step writes them
        into the same tensor whenever it is replayed.
        """

        def at(self, start: Tensor, width: int) -> StepNoise:
            step = super().at(start, width)
            self.uniforms = torch.stack([step.uniform(stream) for stream in Stream], dim=1)
            return step

    sampler = copy.copy(generator.sampler)
    sampler.noise_type = RecordingNoise
    parts = generator.target, generator.drafter, sampler
    recorded = SpeculativeGenerator(*parts, graphs=generator.graphs, kept_bytes=0)
    options = {"max_new_tokens": num, "seed": list(range(len(prompts))), **sampling.options()}
    generation = recorded.start(*left_padded(prompts, generator.target.device), **options)
    draws = []
    while bool((is_active := ~generation.has_ended).any()):
        recorded.step(generation)
        used = generation.state.noise.uniforms[: len(is_active)]
        draws.append(used[is_active].flatten().cpu())
    draws = torch.cat(draws)
    outside = ~((draws >= 0) & (draws < 1))
    return NoiseAudit(len(draws), len(draws) - len(draws.unique()), int(outside.sum()))
