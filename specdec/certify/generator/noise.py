"""Whether a generation ever uses a random number twice."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.certify.generator.text import ENDLESS, Prompts, padded
from specdec.generator import SpeculativeGenerator
from specdec.samplers import Noise, StepNoise, Stream


@dataclass(frozen=True)
class NoiseAudit:
    """The uniforms of a generation.

    Args:
        num_draws: over all rows, streams and steps.
        num_repeated: of them, equal to an earlier one; rows have different seeds.
        num_outside: not in [0, 1).
    """

    num_draws: int
    num_repeated: int
    num_outside: int

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


class _Recorder:
    """A source of noise that remembers what it gave to the rows that had not ended."""

    def __init__(self, noise: Noise, is_active: Callable[[], Tensor]):
        self._noise, self._is_active = noise, is_active
        self.draws: list[Tensor] = []

    def at(self, start: Tensor, width: int) -> StepNoise:
        step = self._noise.at(start, width)
        uniforms = torch.stack([step.uniform(stream) for stream in Stream], dim=1)
        self.draws.append(uniforms[self._is_active()].flatten().cpu())
        return step


@torch.inference_mode()
def audit_noise(
    generator: SpeculativeGenerator, prompts: Prompts, num: int, **sampling
) -> NoiseAudit:
    """Generates, and looks at every uniform of every step.

    Args:
        generator: its sampler accepts and resamples by uniforms.
        prompts: token ids; their numbers are the seeds.
        num: new tokens per prompt.
        sampling: temperature and truncation.
    """
    ids, mask = padded(prompts, generator.target.device)
    seeds = list(range(len(prompts)))
    generation = generator.start(
        ids, mask, max_new_tokens=num, do_sample=True, seed=seeds, **ENDLESS, **sampling
    )
    recorder = _Recorder(generation.state.noise, lambda: ~generation.has_ended)
    generation.state = replace(generation.state, noise=recorder)
    while not bool(generation.has_ended.all()):
        generator.step(generation)
        generation.synchronize()
    draws = torch.cat(recorder.draws)
    outside = ~((draws >= 0) & (draws < 1))
    return NoiseAudit(len(draws), len(draws) - len(draws.unique()), int(outside.sum()))
