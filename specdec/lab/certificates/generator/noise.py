"""Whether a generation ever uses a random number twice.

Three kinds of numbers can be seen: the uniforms that the sampler's `noise_type` makes for every
step; those that sampler and drafter ask it for by names of their own; and what torch's own
functions draw at random while a step runs, of which a rule may make numbers of its own. What none
of them makes (Python's `random`, numpy, a library's kernel) is not seen, and the report says which
numbers were. Races belong to positions, and are run again where a position comes up again.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec.generator import SpeculativeGenerator
from specdec.lab.certificates.generator.reading import inputs_of
from specdec.loop.host import Generation
from specdec.request import Sampling
from specdec.request.lists import left_padded
from specdec.samplers import Stream
from specdec.torch_names import TorchDispatchMode

_CONTINUOUS = {"rand", "rand_like", "randn", "randn_like", "uniform", "normal", "exponential"}
_DISCRETE = {"multinomial", "bernoulli", "randint", "randint_like", "randperm", "random", "poisson"}
"""Random functions of torch; values of the latter repeat in sound use."""


@dataclass(frozen=True)
class NoiseAudit:
    """The random numbers of a generation, whose rows have different seeds."""

    num_draws: int  # uniforms of the noise, over all rows, streams and steps
    num_repeated: int  # equal to an earlier one
    num_outside: int  # not in [0, 1)
    source: str = "Noise"  # name of the `noise_type`
    asked: tuple[str, ...] = ()  # what sampler and drafter asked it for
    of_torch: Mapping[str, int] = field(default_factory=dict)  # calls of torch's random functions
    num_torch_repeated: int = 0  # of these, with the values of an earlier one

    @property
    def passed(self) -> bool:
        """All draws that were seen are different, and in range."""
        return self.num_repeated == self.num_outside == self.num_torch_repeated == 0

    @property
    def false_alarm(self) -> float:
        """Chance that independent draws of 52 bits repeat."""
        return self.num_draws * (self.num_draws - 1) / 2 * 2.0**-52

    def __str__(self) -> str:
        outside = f", {self.num_outside} outside [0, 1)" if self.num_outside else ""
        lines = [
            f"noise: {self.num_draws} uniforms of {self.source}, {self.num_repeated} used before"
            f"{outside} (false alarm {self.false_alarm:.0e}); asked for: "
            + (", ".join(self.asked) or "nothing")
        ]
        if self.of_torch:
            calls = ", ".join(f"{name} x {count}" for name, count in self.of_torch.items())
            lines.append(
                f"steps drew numbers of their own by torch ({calls}): {self.num_torch_repeated} of "
                "these calls gave the numbers of an earlier one"
            )
        if not any(_decides(name) for name in self.asked):
            lines.append(
                "the rule asked for no number of the noise: if it draws at random, by other means "
                "than torch's functions, its numbers were not seen"
            )
        return "\n          ".join(lines)


def _decides(asked: str) -> bool:
    """Whether a rule may decide by what was asked for."""
    is_usual = asked in ("accept", "resample", "exponentials")
    return is_usual or asked.startswith(("race", "'", '"'))


@torch.inference_mode()
def audit_noise(
    generator: SpeculativeGenerator,
    prompts: list[list[int]],
    num: int,
    sampling: Sampling,
    row_inputs: Mapping[str, Any] | None = None,
) -> NoiseAudit:
    """Generates `num` tokens per prompt with a sampler that accepts and resamples by uniforms, and
    looks at every uniform of every step; then once more by eager steps, and looks at what is asked
    for and at the numbers that torch draws. The numbers of the prompts are the seeds.
    """
    source, asked = generator.sampler.noise_type, []

    class RecordingNoise(source):
        """Keeps the uniforms `[B, streams, K + 1]` of the last step; a captured step writes them
        into the same tensor whenever it is replayed.
        """

        def at(self, start: Tensor, width: int) -> Any:
            step = super().at(start, width)
            self.uniforms = torch.stack([step.uniform(stream) for stream in Stream], dim=1)
            return step

    class AskedNoise(source):
        """Takes down what is asked for."""

        def at(self, start: Tensor, width: int) -> Any:
            self.step = _Asked(super().at(start, width), asked)
            return self.step

    everyone = list(range(len(prompts)))
    inputs = left_padded(prompts, generator.target.device)
    options = {"max_new_tokens": num, "seed": everyone, **sampling.options()}
    options["row_inputs"] = inputs_of(row_inputs, everyone)

    def start(noise_type: type, **how: Any) -> tuple[SpeculativeGenerator, Generation]:
        sampler = copy.copy(generator.sampler)
        sampler.noise_type = noise_type
        parts = generator.target, generator.drafter, sampler
        recorded = SpeculativeGenerator(*parts, kept_bytes=0, **how)
        return recorded, recorded.start(*inputs, **options)

    recorded, generation = start(RecordingNoise, graphs=generator.graphs)
    draws = []
    while bool((is_active := ~generation.has_ended).any()):
        recorded.step(generation)
        used = generation.state.noise.uniforms[: len(is_active)]
        draws.append(used[is_active].flatten().cpu())

    recorded, generation = start(AskedNoise, graphs=False)
    seen = _RandomCalls()
    with seen:
        while bool((is_active := ~generation.has_ended).any()):
            recorded.step(generation)
            named = generation.state.noise.step.named.values()
            draws += [table[: len(is_active)][is_active].flatten().cpu() for table in named]
    draws = torch.cat(draws)
    outside = ~((draws >= 0) & (draws < 1))
    return NoiseAudit(
        len(draws),
        len(draws) - len(draws.unique()),
        int(outside.sum()),
        source.__name__,
        tuple(dict.fromkeys(asked)),
        dict(seen.calls),
        seen.num_repeated,
    )


class _Asked:
    """The numbers of a step, a list of what was asked for, and the uniforms of each name `[B, n]`,
    once however often the step asked for them.
    """

    def __init__(self, noise: Any, asked: list[str], named: dict[str, Tensor] | None = None):
        self._noise, self._asked = noise, asked
        self.named = {} if named is None else named

    def __getattr__(self, name: str) -> Any:
        return getattr(self._noise, name)

    def at_depths(self, depths: Tensor | int, path: Tensor | int = 0) -> _Asked:
        return _Asked(self._noise.at_depths(depths, path), self._asked, self.named)

    def uniform(self, stream: Stream | str, num: int | None = None) -> Tensor:
        if not isinstance(stream, str):
            self._asked.append(Stream(stream).name.lower())
            return self._noise.uniform(stream)
        self._asked.append(repr(stream))
        found, known = self._noise.uniform(stream, num), self.named.get(stream)
        if known is None or known.shape[1] < found.shape[1]:
            self.named[stream] = found
        return found

    def race(self, *inputs: Any, **options: Any) -> Tensor:
        self._asked.append(_race_of(options))
        return self._noise.race(*inputs, **options)

    def arrivals(self, *inputs: Any, **options: Any) -> Tensor:
        self._asked.append(_race_of(options))
        return self._noise.arrivals(*inputs, **options)

    def exponentials(self, vocab_size: int) -> Tensor:
        self._asked.append("exponentials")
        return self._noise.exponentials(vocab_size)


def _race_of(options: Mapping[str, Any]) -> str:
    """What a race is called in a report."""
    most = int(torch.as_tensor(options.get("path", 0), device="cpu").max())
    return f"race of path {most}" if most else "race"


class _RandomCalls(TorchDispatchMode):
    """Within it, random functions of torch are counted, and their values compared."""

    def __init__(self):
        super().__init__()
        self.calls, self.num_repeated, self._values = Counter(), 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.strip("_")
        if name in _CONTINUOUS | _DISCRETE:
            self.calls[name] += 1
        if name in _CONTINUOUS and isinstance(out, Tensor) and out.numel():
            values = name, *out.flatten().tolist()
            self.num_repeated += values in self._values
            self._values.add(values)
        return out
