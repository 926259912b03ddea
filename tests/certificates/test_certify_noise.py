"""`certify(generator, prompts)` fails noise that is used twice, for any two purposes."""

import numpy as np
import pytest
import torch
from diagonal import first
from test_certify_runs import certify_run, drafter
from text_laws import PROMPT, TARGET, tiny

from specdec import CouplingSampler, RejectionSampler, SpeculativeGenerator
from specdec.lab.certificates.generator.noise import audit_noise
from specdec.lab.certificates.generator.text import audit_text
from specdec.request import Sampling
from specdec.samplers import Noise, ScriptedNoise, StepNoise, Stream


class SharesStreams(Noise):
    """One stream is another one."""

    streams = Stream.RESAMPLE, Stream.PROPOSE

    def at(self, start, width) -> ScriptedNoise:
        step, (one, other) = super().at(start, width), self.streams
        uniforms = [step.uniform(other if stream == one else stream) for stream in Stream]
        return ScriptedNoise(torch.stack(uniforms, dim=1))


class SharesAcceptance(SharesStreams):
    """Proposing and accepting."""

    streams = Stream.ACCEPT, Stream.PROPOSE


class ReusedOnTheNextStep(Noise):
    """The same draws in every second step."""

    def at(self, start, width) -> StepNoise:
        return super().at(start // 4, width)


class OneSeedForAll(Noise):
    """Ignores the rows' seeds."""

    def __init__(self, seeds, **place):
        super().__init__([7] * len(seeds), **place)


def with_noise(noise):
    """A sound sampler and bad noise."""
    sampler = RejectionSampler()
    sampler.noise_type = noise
    return sampler


NOISES = [SharesStreams, SharesAcceptance, ReusedOnTheNextStep, OneSeedForAll]


@pytest.mark.parametrize("noise", NOISES)
def test_noise_that_is_used_twice_fails(noise):
    generator = SpeculativeGenerator(tiny(TARGET), drafter(), with_noise(noise))
    assert not audit_noise(generator, [PROMPT, [2, 2]], 20, Sampling(top_k=4)).passed


@pytest.mark.parametrize("noise", first(NOISES, [SharesStreams, OneSeedForAll]))
def test_noise_that_is_used_twice_is_also_seen_in_the_text(noise):
    options = {"num_samples": 256, "settings": [{"top_k": 3}]}
    assert not certify_run(drafter(), with_noise(noise), **options).text.passed


class OutOfRange(Noise):
    """Uniforms up to 2."""

    def at(self, start, width) -> ScriptedNoise:
        step = super().at(start, width)
        return ScriptedNoise(torch.stack([2 * step.uniform(stream) for stream in Stream], dim=1))


def test_uniforms_out_of_range_fail():
    generator = SpeculativeGenerator(tiny(TARGET), None, with_noise(OutOfRange))
    found = audit_noise(generator, [PROMPT], 20, Sampling(top_k=4))
    assert not found.passed
    assert "outside [0, 1)" in str(found)


class KeyedBySteps(Noise):
    """Noise of a step, not of a position."""

    def at(self, start, width) -> StepNoise:
        return super().at(start * 100, width)


def test_coupled_noise_that_belongs_to_steps_fails():
    sampler = CouplingSampler()
    sampler.noise_type = KeyedBySteps
    generator = SpeculativeGenerator(tiny(TARGET), drafter(), sampler)
    found = audit_text(generator, [PROMPT], 20, Sampling(top_k=4))
    assert not found.passed
    assert "not explained by rounding" in str(found)


class OwnNumbers(RejectionSampler):
    """Accepts by numbers of its own, the same ones in every step."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def accept(self, draft, target_logits, logits_filter, noise):
        own = self.make((len(target_logits), len(Stream), target_logits.shape[1]))
        return super().accept(draft, target_logits, logits_filter, ScriptedNoise(own))


def by_torch(shape):
    """Of a generator that begins anew."""
    seeded = torch.Generator().manual_seed(3)
    return torch.rand(shape, dtype=torch.float64, generator=seeded)


def by_numpy(shape):
    """Of a generator that torch does not know."""
    return torch.from_numpy(np.random.default_rng(3).random(shape))


def fresh(shape):
    """New ones in each step."""
    return torch.rand(shape, dtype=torch.float64)


def test_the_report_says_which_numbers_were_seen():
    found = {}
    for make in (by_torch, by_numpy, fresh):
        generator = SpeculativeGenerator(tiny(TARGET), drafter(), OwnNumbers(make))
        found[make] = audit_noise(generator, [PROMPT, [2, 2]], 20, Sampling(top_k=4))
        assert found[make].asked == ("propose",)
        assert "the rule asked for no number of the noise" in str(found[make])
    assert not found[by_torch].passed
    assert "steps drew numbers of their own by torch (rand x" in str(found[by_torch])
    assert "of these calls gave the numbers of an earlier one" in str(found[by_torch])
    assert found[by_numpy].passed  # not seen, and said so
    assert found[fresh].passed
    usual = SpeculativeGenerator(tiny(TARGET), drafter())
    report = audit_noise(usual, [PROMPT], 20, Sampling(top_k=4))
    assert "uniforms of Noise, 0 used before" in str(report)
    assert set(report.asked) == {"propose", "accept", "resample"}
    assert not report.of_torch
