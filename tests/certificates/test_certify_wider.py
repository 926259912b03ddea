"""`certify(rule)` finds rules that are wrong only where a toy problem is not: in a large vocabulary
or a usual batch, with logits of other types, after many calls; it does not accuse others.
"""

import functools
import random

import numpy as np
import pytest
import torch
from diagonal import case

from specdec import BlockSampler, CouplingSampler, RejectionSampler, certify
from specdec.lab.certificates import ForeignSampler
from specdec.lab.certificates.sampler.wider import TYPES
from specdec.samplers import GBVSampler, Noise
from specdec.types import PAD_TOKEN, Verdict

FEW = {"sizes": ((3, 1, 4), (2, 2, 4))}
TINY = {"sizes": ((3, 1, 2),), "trees": ()}
BASES = [RejectionSampler, BlockSampler, CouplingSampler]


def wrong_where(base, is_wrong, change=lambda x: 1.3 * x):
    """A sound rule, but for logits and drafts of which something holds."""

    class Wrong(base):
        def accept(self, draft, target_logits, logits_filter, noise):
            if is_wrong(target_logits, draft):
                target_logits = change(target_logits)
            return super().accept(draft, target_logits, logits_filter, noise)

    return Wrong()


def kinds_of(report):
    return {failure.kind for failure in report.failures}


@pytest.mark.parametrize(
    ("base", "most"),
    [
        (BASES[0], 10),
        *(case([base, 10], False) for base in BASES[1:]),
        case([BASES[0], 30_000], False),
    ],
)
def test_a_rule_that_is_wrong_in_a_larger_vocabulary_fails(base, most):
    report = certify(wrong_where(base, lambda x, _: x.shape[-1] > most), **FEW)
    assert kinds_of(report) <= {"law", "ids"}
    assert "ids among" in str(report) or "of a vocabulary of" in " ".join(str(report).split())


def test_in_the_largest_one_a_wrong_first_token_is_seen_too():
    def first(logits):
        return torch.cat([1.3 * logits[:, :1], logits[:, 1:]], dim=1)

    report = certify(wrong_where(BASES[0], lambda x, _: x.shape[-1] > 30_000, first), **TINY)
    assert kinds_of(report) == {"ids"}


@pytest.mark.parametrize("base", [RejectionSampler, GBVSampler])
def test_so_does_one_that_is_wrong_there_on_trees_alone(base):
    rule = wrong_where(base, lambda x, draft: x.shape[-1] > 10 and not draft.is_chain)
    shapes = {"paths": ((2, 1),)} if base is GBVSampler else {"trees": ((-1, -1),)}
    report = certify(rule, sizes=((2, 1, 4),), **shapes)
    assert kinds_of(report) == {"law"}
    assert "2 ids among 307" in str(report)


@pytest.mark.parametrize(("base", "size"), [(BASES[0], 307), (BASES[2], 32_003)])
def test_an_id_that_nobody_gives_a_probability_is_impossible(base, size):
    """As where logits that are masked come out as very small ones, or a table is read beside."""

    def leaky(logits):
        logits = logits.clone()
        logits[..., 5] = logits.amax(dim=-1) - 9
        return logits

    report = certify(wrong_where(base, lambda x, _: x.shape[-1] == size, leaky), **TINY)
    assert kinds_of(report) == {"zero"}
    assert f"id 5 is emitted in a vocabulary of {size}" in str(report)


@pytest.mark.parametrize(
    ("base", "dtype"), [*((BASES[0], dtype) for dtype in TYPES), (BASES[2], TYPES[0])]
)
def test_a_rule_that_is_wrong_for_logits_of_one_type_fails(base, dtype):
    report = certify(wrong_where(base, lambda x, _: x.dtype == dtype), **TINY)
    assert kinds_of(report) == {"law"}
    assert f"logits in {str(dtype).removeprefix('torch.')}" in str(report)


def test_a_rule_that_cannot_read_logits_of_a_type_is_told_which():
    rule = wrong_where(RejectionSampler, lambda x, _: x.dtype == torch.float16, torch.linalg.inv)
    with pytest.raises(RuntimeError, match="Wrong fails on mixed drafts with logits in float16"):
        certify(rule, **TINY)


CALLS = {"count": 0}


class Counts(RejectionSampler):
    """Sound, until it has been called 5 000 times."""

    calls, seen = 0, []

    def accept(self, draft, target_logits, logits_filter, noise):
        target_logits = target_logits * (1.3 if self.number() > 5000 else 1.0)
        return super().accept(draft, target_logits, logits_filter, noise)


class InItself(Counts):
    def number(self):
        self.calls += 1
        return self.calls


class InATensor(Counts):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(3, 4000))

    def number(self):
        self.kept[1, 2:3].add_(1)
        return self.kept[1, 2]


class InItsClass(Counts):
    def number(self):
        type(self).calls += 1
        return self.calls


class InAList(Counts):
    def number(self):
        self.seen.append(1)
        return len(self.seen)


class InADefault(Counts):
    def number(self, kept={"calls": 0}):  # noqa: B006  the fault
        kept["calls"] += 1
        return kept["calls"]


class InItsModule(Counts):
    def number(self):
        CALLS["count"] += 1
        return CALLS["count"]


class OfOwnNumbers(InItself):
    noise_type = type("OwnNoise", (Noise,), {})


@pytest.mark.parametrize(
    "rule", [InItself, InATensor, InItsClass, InAList, InADefault, InItsModule, OfOwnNumbers]
)
def test_a_rule_that_counts_its_calls_fails(rule):
    report = certify(rule(), **TINY, num_draws=64)
    assert kinds_of(report) == {"state"}
    assert "a call that repeats the one before it changes" in str(report)


def test_so_does_a_foreign_rule_with_a_count_in_a_closure():
    calls = 0

    def rule(draft_tokens, draft_probs, target_probs, noise):
        nonlocal calls
        calls += 1
        return [int(noise.draw(target_probs[0]))]

    assert kinds_of(certify(ForeignSampler(rule), **TINY)) == {"state"}
    assert kinds_of(certify(ForeignSampler(functools.partial(rule)), **TINY)) == {"state"}


class KeepsAMask(RejectionSampler):
    """What it makes once for a shape it keeps."""

    def __init__(self):
        super().__init__()
        self.masks, self.unset = {}, float("nan")
        self.random = random.Random(0), np.random.default_rng(0)  # numbers of nothing

    def accept(self, draft, target_logits, logits_filter, noise):
        [source.random() for source in self.random]
        shape = target_logits.shape
        if shape not in self.masks:
            self.masks[shape] = torch.zeros(shape)
        logits = target_logits + self.masks[shape].to(target_logits.dtype)
        return super().accept(draft, logits, logits_filter, noise)


class OwnGenerator(RejectionSampler):
    """Draws one token of the target's by a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def accept(self, draft, target_logits, logits_filter, noise):
        probs = logits_filter(target_logits)[:, 0]
        tokens = torch.full(target_logits.shape[:2], PAD_TOKEN)
        tokens[:, 0] = torch.multinomial(probs, 1, generator=self.generator)[:, 0]
        return Verdict(tokens, torch.zeros_like(tokens[:, 0]), draft.num_valid)


def test_a_rule_with_a_generator_of_its_own_is_tested_by_draws():
    report = certify(OwnGenerator(), **TINY, num_draws=256)
    assert report.passed, report
    assert not report.is_exact


def test_a_rule_that_keeps_what_never_changes_passes():
    report = certify(KeepsAMask(), **TINY)
    assert report.passed, report
    said = " ".join(str(report).split())
    assert "the same with 307 ids, 32003 ids, 33 ids, 257 ids, 701 ids, float32" in said
