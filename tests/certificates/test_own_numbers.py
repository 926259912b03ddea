"""Rules with numbers of their own: races by path are enumerated, uniforms by name are tried by
draws, and nothing passes that was not tried.
"""

import pytest
import torch
from architectures import VOCAB
from drafter_table import MODEL
from drafting import perturbed, ragged_prompts
from text_laws import ALPHA, TARGET, p_values_of_texts, sample, tiny

from examples.list_coupling import DrawsAhead, ListSampler, OfTheDraftItself, OneRaceForAllDepths
from specdec import (
    CouplingSampler,
    ModelDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    Stream,
    certify,
)
from specdec.kernels import draw
from specdec.lab.certificates.generator.noise import audit_noise
from specdec.request import Sampling
from specdec.samplers import Noise, StepNoise

FEW = {"sizes": ((2, 2, 2),), "paths": ((2, 2),)}
CHAINS = {"sizes": ((2, 2, 2), (3, 1, 2)), "num_draws": 4096}


def test_lists_of_races_are_enumerated():
    report = certify(ListSampler(), **FEW)
    assert report.passed
    assert report.is_exact
    assert report.deviation < 1e-12


@pytest.mark.parametrize(
    ("rule", "kind", "says"),
    [
        (OneRaceForAllDepths, "law", "ends so: has probability"),
        (OfTheDraftItself, "decision", "which lists race at a position depends on draft tokens"),
        (DrawsAhead, "draft", "depend on the races of later positions"),
    ],
)
def test_faults_of_lists_are_found(rule, kind, says):
    report = certify(rule(), **FEW)
    assert report.verdict == "FAIL"
    assert report.is_exact
    (found, *_) = [failure for failure in report.failures if failure.kind == kind]
    assert says in found.text


class Ahead(ListSampler):
    """The fault: races of the next position."""

    def depths(self, draft):
        return draft.depths + 1


class Unequal(ListSampler):
    """The fault: one list is favoured."""

    def lists_in_use(self, draft):
        in_use = super().lists_in_use(draft)
        return in_use & (torch.arange(in_use.shape[2]) == in_use.shape[2] - 1)


@pytest.mark.parametrize("rule", [Ahead, Unequal])
def test_other_faults_of_lists_are_found(rule):
    if rule is Ahead:  # after the last token there are no such numbers
        with pytest.raises(RuntimeError, match=r"fails on .*index 3 is out of bounds"):
            certify(rule(), **FEW)
    else:
        assert not certify(rule(), **FEW).passed


class Named(RejectionSampler):
    """The rejection rule by numbers of its own."""

    names = "my accept", "my extra"

    def accept(self, draft, target_logits, logits_filter, noise):
        accept, extra = (noise.uniform(name, draft.tokens.shape[1] + 1) for name in self.names)

        class Own:
            def uniform(self, stream):
                return accept if stream == Stream.ACCEPT else extra

        return super().accept(draft, target_logits, logits_filter, Own())


class OneNumberTwice(Named):
    """The fault: one number for two purposes."""

    names = "mine", "mine"


class Sometimes(RejectionSampler):
    """Asks for a number of its own in drafts of one token alone."""

    def accept(self, draft, target_logits, logits_filter, noise):
        verdict = super().accept(draft, target_logits, logits_filter, noise)
        if draft.tokens.shape[1] == 1:
            noise.uniform("mine", 1)
        return verdict


@pytest.mark.parametrize("rule", [Named, Sometimes])
def test_named_numbers_are_tried_by_draws_of_stated_power(rule):
    report = certify(rule(), **CHAINS)
    assert report.passed
    assert not report.is_exact
    assert "it decides by numbers of its own (uniform('m" in report.drawn.reason
    assert 0 < report.drawn.detectable < 0.1
    assert f"detectable TV {report.drawn.detectable:.3f}" in " ".join(str(report).split())


def test_a_named_number_that_is_used_twice_is_found():
    report = certify(OneNumberTwice(), **CHAINS)
    assert report.verdict == "FAIL"
    assert {failure.kind for failure in report.failures} == {"draws"}


def draw_by_name(logits, logits_filter, noise, index, *, wants_probs, out=None):
    """Independent draws by numbers of a name."""
    count, probs = logits.shape[1], logits_filter(logits)
    own = noise.uniform("mine", index + count)[:, index:]
    return draw(probs, own), probs if out is None else out.copy_(probs)


class DrawsByName(RejectionSampler):
    draw_draft = staticmethod(draw_by_name)


class DrawsAndAcceptsByOneName(Named):
    """The fault: the numbers that draw the draft accept it."""

    names = "mine", "my extra"
    draw_draft = staticmethod(draw_by_name)


class DrawsAndAcceptsByNames(Named):
    draw_draft = staticmethod(draw_by_name)


def test_drafts_that_are_drawn_by_name_are_tried_with_the_rule():
    report = certify(DrawsByName(), **CHAINS)
    assert report.passed
    assert report.is_exact  # the rule; its drafts by draws
    assert "(by draws" in report.draft_law
    both = certify(DrawsAndAcceptsByNames(), **CHAINS)
    assert both.passed
    assert "has its drafts drawn by such; chains of soft drafts were tried" in both.drawn.reason
    assert not certify(DrawsAndAcceptsByOneName(), **CHAINS).passed


def lists_of_tiny(shape="3x2 paths"):
    return ModelDrafter(perturbed(tiny(TARGET)), tree=shape)


@pytest.mark.parametrize("rule", [ListSampler, OneRaceForAllDepths])
def test_texts_by_lists_have_the_targets_distribution(rule):
    result = sample(lists_of_tiny(), rule(), "plain", 2500)
    least = min(p_values_of_texts(result, "plain").values())
    assert (least > ALPHA) is (rule is ListSampler)


def test_one_list_is_the_coupling_rule_and_captured_lists_are_eager_ones():
    ids, mask = ragged_prompts(VOCAB, 5, 9)
    options = {"max_new_tokens": 16, "do_sample": True, "seed": [1, 2], "eos_token_id": None}
    drafter = ModelDrafter(perturbed(MODEL), 3)
    texts = [
        SpeculativeGenerator(MODEL, drafter, rule).generate(ids, mask, **options).sequences
        for rule in (CouplingSampler(), ListSampler())
    ]
    assert texts[0].equal(texts[1])
    steps = []
    for graphs in (False, True):
        drafter = ModelDrafter(perturbed(MODEL), tree="3x2 paths")
        generator = SpeculativeGenerator(MODEL, drafter, ListSampler(), graphs=graphs)
        result = generator.generate(ids, mask, check=graphs, **options)
        steps.append([[vars(step) for step in row] for row in result.steps])
    assert steps[0] == steps[1]


def test_more_lists_accept_more():
    lengths = [
        sample(lists_of_tiny(f"{count}x2 paths"), ListSampler(), "plain", 1000).stats
        for count in (1, 4)
    ]
    assert lengths[1].acceptance_length > lengths[0].acceptance_length + 0.1


def test_a_generator_with_lists_is_certified_and_its_audit_says_what_was_asked_for():
    generator = SpeculativeGenerator(tiny(TARGET), lists_of_tiny(), ListSampler())
    report = certify(generator, [[1, 4, 2], [3]], num_samples=64, max_new_tokens=12, audit_tokens=8)
    assert report.passed
    assert {"race of path 2", "race"} <= set(report.noise.asked)


class Repeats(Noise):
    """The fault: a name's numbers are those that accept."""

    def at(self, start, width):
        class Step(StepNoise):
            def uniform(self, stream, num=None):
                if stream == "mine":
                    return super().uniform(Stream.ACCEPT)[:, :num]
                return super().uniform(stream, num)

        return Step(self._key, start, width)


class SometimesAlways(RejectionSampler):
    def accept(self, draft, target_logits, logits_filter, noise):
        noise.uniform("mine", 1)
        noise.uniform("mine", 2)  # the same ones and one more: no repetition
        return super().accept(draft, target_logits, logits_filter, noise)


def test_the_audit_of_noise_sees_named_numbers():
    counts = []
    for source, passes in ((Noise, True), (Repeats, False)):
        sampler = SometimesAlways()
        sampler.noise_type = source
        generator = SpeculativeGenerator(
            tiny(TARGET), ModelDrafter(perturbed(tiny(TARGET)), 2), sampler
        )
        audit = audit_noise(generator, [[1, 4, 2], [3]], 12, Sampling())
        assert "'mine'" in audit.asked
        assert audit.passed is passes
        counts.append(audit.num_draws)
    plain = SpeculativeGenerator(tiny(TARGET), ModelDrafter(perturbed(tiny(TARGET)), 2))
    usual = audit_noise(plain, [[1, 4, 2], [3]], 12, Sampling())
    assert counts[0] == usual.num_draws + 2 * usual.num_draws // 9  # K = 2: 3 x 3 in each step
