"""`certify(rule)` tries the rule's own `draw_draft`, and the numbers of its own `noise_type`."""

import pytest
import torch
from diagonal import diagonal, first

from specdec import BlockSampler, CouplingSampler, RejectionSampler, certify
from specdec.samplers import Noise, StepNoise, Stream, draw_by_inversion, draw_by_race

FEW = {"sizes": ((2, 2, 2),), "trees": (), "paths": (), "num_draws": 4096}


def rule(draw_draft, kind=RejectionSampler, **attributes):
    """A sound rule with its own way of drawing drafts."""
    sampler = type("Own", (kind,), {"draw_draft": staticmethod(draw_draft), **attributes})()
    return sampler


def argmax(logits, logits_filter, noise, index, *, wants_probs, out=None):
    """The likeliest tokens, reported as draws."""
    probs = logits_filter(logits)
    return probs.argmax(dim=-1), probs


def argmax_alone(logits, logits_filter, noise, index, *, wants_probs, out=None):
    """The likeliest tokens, reported as point masses."""
    return logits.argmax(dim=-1), None


def first_number(logits, logits_filter, noise, index, *, wants_probs, out=None):
    """One number for all tokens."""
    u = noise.uniform(Stream.PROPOSE)[:, :1].expand(-1, logits.shape[1])
    return logits_filter.draw(logits, u)


def accepting_number(logits, logits_filter, noise, index, *, wants_probs, out=None):
    """The number that judges the token draws it."""
    return logits_filter.draw(
        logits, noise.uniform(Stream.ACCEPT).narrow(1, index, logits.shape[1])
    )


def gumbel(logits, logits_filter, noise, index, *, wants_probs, out=None):
    """By the race of the position, which the rule does not use."""
    return noise.race(logits, logits_filter, index), logits_filter(logits)


def upside_down(logits, logits_filter, noise, index, *, wants_probs, out=None):
    """1 - u in place of u: another step function, and as honest."""
    u = noise.uniform(Stream.PROPOSE).narrow(1, index, logits.shape[1])
    return logits_filter.draw(logits, (1 - u).clamp(max=1 - 2.0**-52))


def own_numbers(logits, logits_filter, noise, index, *, wants_probs, out=None):
    """By torch's own random numbers, which nothing else uses."""
    return logits_filter.draw(logits, torch.rand(logits.shape[:2], dtype=torch.float64))


def late_fault(logits, logits_filter, noise, index, *, wants_probs, out=None):
    """Sharper than reported, from the third token on."""
    scale = torch.ones(logits.shape[1], 1, dtype=logits.dtype)
    scale[max(0, 2 - index) :] = 1.1
    tokens, _ = draw_by_inversion(logits * scale, logits_filter, noise, index, wants_probs=False)
    return tokens, logits_filter(logits)


HONEST = {
    "own numbers": (own_numbers, "reported probabilities (by draws, 4096 pairs"),
    "inversion": (draw_by_inversion, "reported probabilities (exact"),
    "point masses": (argmax_alone, "reported as point masses"),
    "gumbel": (gumbel, "reported probabilities (by draws, 4096 pairs"),
    "upside down": (upside_down, "reported probabilities (by draws, 4096 pairs"),
}
DISHONEST = {
    "late": (late_fault, "draft token 2 is"),
    "argmax": (argmax, "is reported with"),
    "one number": (first_number, "do not have the reported probabilities (p-value"),
    "the judge's": (accepting_number, "depend on the numbers (Stream.ACCEPT or RESAMPLE)"),
}


@pytest.mark.parametrize("name", first(HONEST, ["gumbel", "point masses", "own numbers"]))
def test_an_honest_way_of_drawing_passes(name):
    draw_draft, says = HONEST[name]
    report = certify(rule(draw_draft), **FEW)
    assert report.passed, report
    assert says in report.draft_law


@pytest.mark.parametrize(("name", "kind"), diagonal(DISHONEST, [RejectionSampler, BlockSampler]))
def test_tokens_that_are_reported_with_other_probabilities_fail(name, kind):
    draw_draft, says = DISHONEST[name]
    report = certify(rule(draw_draft, kind), **FEW)
    assert not report.passed
    assert [failure.kind for failure in report.failures] == ["draft"]
    text = " ".join(str(report).split())
    assert says in text
    assert text.startswith("FAIL Own")


def test_a_race_with_a_wrapper_of_its_own_is_enumerated_as_one():
    def wrapped(*inputs, **options):
        return draw_by_race(*inputs, **options)

    report = certify(rule(wrapped, CouplingSampler), **FEW)
    assert report.passed, report
    assert report.is_exact


class OwnStep(StepNoise):
    """With numbers for the rule alone."""

    def coins(self, count):
        return self.uniform(Stream.ACCEPT)[:, :count]


class OwnNoise(Noise):
    """Opens such steps."""

    def at(self, start, width):
        return OwnStep(self._key, start, width)


class Coins(RejectionSampler):
    """The rule by the coins of its own noise."""

    noise_type = OwnNoise
    factor = 1.0

    def accept(self, draft, target_logits, logits_filter, noise):
        coins = noise.coins(draft.tokens.shape[1]) * self.factor

        class Judged:
            """The coins for the uniforms that accept."""

            def uniform(self, stream):
                return coins if stream == Stream.ACCEPT else noise.uniform(stream)

        return super().accept(draft, target_logits, logits_filter, Judged())


def test_a_rule_with_its_own_noise_is_tested_by_draws():
    report = certify(Coins(), **FEW)
    assert report.passed, report
    assert not report.is_exact
    assert "its numbers are those of OwnNoise, a noise_type of its own" in str(report)
    wrong = Coins()
    wrong.factor = 0.7
    assert not certify(wrong, **FEW).passed
    drawn = rule(argmax, noise_type=OwnNoise)  # drafts are drawn by the rule's own way
    assert not certify(drawn, **FEW).passed


class OneSeed(Noise):
    """All rows have the same numbers."""

    def __init__(self, seeds, **place):
        super().__init__([7] * len(seeds), **place)


def test_own_noise_that_is_not_random_fails():
    wrong = RejectionSampler()
    wrong.noise_type = OneSeed
    assert not certify(wrong, **FEW).passed


def test_races_by_own_noise_are_drawn():
    own = CouplingSampler()
    own.noise_type = type("Fresh", (Noise,), {})
    assert certify(own, **FEW).passed
