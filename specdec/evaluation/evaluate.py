"""`evaluate`: true acceptance, measured by generating."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.generator import SpeculativeGenerator
from specdec.results import GenerationResult, SpeculationStats


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A generation that was measured.

    Args:
        result: with its trace.
        seconds: of wall-clock, reading the prompts included.
    """

    result: GenerationResult
    seconds: float

    @property
    def stats(self) -> SpeculationStats:
        """Counts and rates."""
        return self.result.stats

    @property
    def acceptance_error(self) -> float:
        """Standard error of the acceptance length over the steps."""
        accepted = [float(step.num_accepted) for row in self.result.trace for step in row]
        return torch.tensor(accepted).std(correction=0).item() / max(len(accepted), 1) ** 0.5


def evaluate(
    generator: SpeculativeGenerator,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
) -> Evaluation:
    """Generates with a trace and measures wall-clock time; torch's global generator is not used.

    Args:
        generator: target, drafter and sampler to be measured.
        input_ids: `[B, T]` prompts, padded left or right.
        attention_mask: `[B, T]` or `None`.
        max_new_tokens: of each prompt.
        temperature: 0 is greedy; else row b is sampled with seed b.

    Raises:
        TypeError, ValueError: as `SpeculativeGenerator.generate`.

    Example:
        >>> from specdec import PromptLookupDrafter, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), PromptLookupDrafter(3))
        >>> evaluation = evaluate(generator, torch.tensor([[7, 8, 9, 7, 8]]), max_new_tokens=8)
        >>> 1 <= evaluation.stats.acceptance_length <= 4
        True
    """
    device = generator.target.device
    ids = input_ids.to(device)
    mask = None if attention_mask is None else attention_mask.to(device)
    sampling = {"do_sample": False}
    if temperature > 0:
        seeds = list(range(len(ids)))
        sampling = {"do_sample": True, "temperature": temperature, "seed": seeds}
    started = time.perf_counter()
    result = generator.generate(ids, mask, max_new_tokens=max_new_tokens, trace=True, **sampling)
    return Evaluation(result, time.perf_counter() - started)
