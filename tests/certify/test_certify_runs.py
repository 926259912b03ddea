"""`certify(generator, prompts)` passes sound generators and fails planted bugs.

The target has six tokens. With 600 samples and a false-alarm rate of 1e-6 over three tests, total
variations above 0.1616 of the first token's law are found with 99 % power; planted bugs get 2000.
"""

import copy
from dataclasses import replace

import pytest
import torch
from text_laws import DRAFT, PROMPT, TARGET, VOCAB, tiny

from specdec import (
    CouplingSampler,
    Drafter,
    ModelDrafter,
    NoDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    Target,
)
from specdec.certify import certify
from specdec.certify.generator.law import check_enumerable, run_law_tests, text_laws
from specdec.certify.generator.text import audit_text
from specdec.request import Sampling
from specdec.samplers import Warp
from specdec.types import Draft

QUICK = {"num_samples": 600, "batch_size": 600, "audit_tokens": 12}


def drafter():
    return ModelDrafter(tiny(DRAFT), num_draft_tokens=2)


def certify_run(drafter, sampler="auto", **options):
    generator = SpeculativeGenerator(tiny(TARGET), drafter, sampler)
    return certify(generator, [PROMPT], **QUICK | options)


def has_the_targets_law(drafter, sampler="auto"):
    """The verdict of the tests of the law alone."""
    plan = {"num_samples": 2000, "num_tokens": 2, "false_alarm": 1e-6, "batch_size": 1000}
    generator = SpeculativeGenerator(tiny(TARGET), drafter, sampler)
    tests = run_law_tests(generator, [PROMPT], **plan, sampling=Sampling(top_k=3), progress=iter)
    return all(test.passed for test in tests)


SOUND = [
    (drafter, "auto"),
    (drafter, CouplingSampler()),
    (lambda: PromptLookupDrafter(2), "auto"),
    (NoDrafter, "auto"),
]


@pytest.mark.parametrize(("drafter", "sampler"), SOUND)
def test_sound_generators_pass(drafter, sampler):
    report = certify_run(drafter(), sampler)
    assert report.passed
    assert report.greedy.num_tokens == QUICK["audit_tokens"]
    assert [test.num_cells for test in report.tests] == [4, 16, 64]
    assert report.detectable == pytest.approx(0.1616, abs=1e-4)
    assert str(report).startswith("PASS")


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "sampler"), SOUND)
def test_sound_generators_pass_with_power(drafter, sampler):
    report = certify_run(drafter(), sampler, num_samples=2000, batch_size=1000)
    assert report.passed
    assert report.detectable == pytest.approx(0.0885, abs=1e-4)
    assert has_the_targets_law(drafter(), sampler)


def test_prompts_of_unequal_length_are_audited_together():
    generator = SpeculativeGenerator(tiny(TARGET), drafter())
    few = {"num_samples": 100, "audit_tokens": 8}
    report = certify(generator, [PROMPT, [3], [5, 0]], **QUICK | few)
    assert report.passed
    assert report.greedy.num_tokens == 3 * 8
    assert {test.prompt for test in report.tests} == {0, 1, 2}


class Stateless(Drafter):
    """Fits every target and reads no prompt."""

    def validate(self, *, vocab_size, device):
        """Nothing is asked."""

    def init_state(self, *sizes, **target):
        """Nothing."""

    def prefill(self, context, state):
        """Nothing."""


class ArgmaxWithSoftLaw(ModelDrafter):
    """Proposes the likeliest token and claims to have drawn it."""

    def propose(self, context, state, drawing) -> Draft:
        """The wrong law beside the tokens."""
        draft = super().propose(context, state, drawing)
        if draft.probs is None:  # greedy: this mistake has no effect
            return draft
        return Draft(draft.probs.argmax(dim=-1), draft.probs)


class FilterOnTheTokensOnly(ModelDrafter):
    """Draws behind the filters and tells the law before them."""

    def propose(self, context, state, drawing) -> Draft:
        """Its own last logits decide; one draft token is enough."""
        draft = super().propose(context, state, drawing)
        if draft.probs is None:
            return draft
        plain = replace(drawing, warp=Warp(drawing.warp.batch_size))
        unfiltered = super().propose(context, state, plain)
        return Draft(draft.tokens, unfiltered.probs)


@pytest.mark.parametrize("wrong", [ArgmaxWithSoftLaw, FilterOnTheTokensOnly])
def test_a_drafter_whose_law_is_not_that_of_its_tokens_fails(wrong):
    assert not has_the_targets_law(wrong(tiny(DRAFT), num_draft_tokens=1))


class PrefersTheHighestId(RejectionSampler):
    """Breaks ties the other way round."""

    def accept_greedily(self, draft, target_logits):
        """Ids reversed, decided, and reversed again."""
        last = target_logits.shape[-1] - 1
        reversed_draft = Draft(last - draft.tokens, None, draft.num_valid)
        verdict = super().accept_greedily(reversed_draft, target_logits.flip(-1))
        tokens = torch.where(verdict.tokens < 0, verdict.tokens, last - verdict.tokens)
        return type(verdict)(tokens, verdict.num_accepted, verdict.num_drafted, verdict.faults)


class PrefersTheSecondBest(RejectionSampler):
    """Emits the runner-up."""

    def accept_greedily(self, draft, target_logits):
        """The best is made the worst."""
        best = target_logits.argmax(dim=-1, keepdim=True)
        return super().accept_greedily(draft, target_logits.scatter(-1, best, -1e9))


def audit_of(model, sampler):
    return audit_text(SpeculativeGenerator(model, drafter(), sampler), [PROMPT], 20)


def test_a_greedy_difference_at_a_tie_is_excused():
    model = copy.deepcopy(tiny(TARGET))
    ids = torch.tensor([PROMPT])
    best = SpeculativeGenerator(model, None).generate(ids, max_new_tokens=1, do_sample=False)
    token = best.new_tokens[0, 0].item()
    with torch.no_grad():  # another token is always as likely
        model.lm_head.weight[(token + 1) % VOCAB] = model.lm_head.weight[token]
    audit = audit_of(model, PrefersTheHighestId())
    assert audit.passed
    assert [difference.margin for difference in audit.differences] == [0.0]
    assert "a tie within rounding" in str(audit)


class WrongTarget(Target):
    """The loop's logits are off by far more than rounding."""

    def verify(self, *args, **kwargs):
        """Every other logit too large."""
        output = super().verify(*args, **kwargs)
        return replace(output, logits=output.logits + torch.arange(VOCAB) % 2)


def test_a_wrong_loop_does_not_excuse_its_own_differences():
    audit = audit_of(WrongTarget(tiny(TARGET)), PrefersTheSecondBest())
    assert not audit.passed
    assert audit.differences[0].rounding < 1e-4


def test_a_greedy_difference_beyond_rounding_is_not_excused():
    audit = audit_of(tiny(TARGET), PrefersTheSecondBest())
    assert not audit.passed
    assert [difference.place for difference in audit.differences] == [0]
    assert audit.differences[0].margin > 100 * audit.differences[0].rounding > 0
    assert "not explained by rounding" in str(audit)


SETTINGS = [
    ("two prompts are equal", [PROMPT, [3], PROMPT], {}),
    ("at least one prompt", [], {}),
    ("at least one token in each", [[1], []], {}),
    ("prompts must be lists of integers.*tokenizer", 5, {}),
    ("num_samples", [[1]], {"num_samples": 0}),
    ("false_alarm", [[1]], {"false_alarm": 0.0}),
    ("temperature", [[1]], {"temperature": 0.0}),
    ("num_tokens=7 with top_k=4, or top_k=1 with", [[1]], {"num_tokens": 50}),
]


@pytest.mark.parametrize(("message", "prompts", "options"), SETTINGS)
def test_settings_that_cannot_be_right_are_refused(message, prompts, options):
    with pytest.raises((ValueError, TypeError), match=message):
        certify(SpeculativeGenerator(tiny(TARGET), None), prompts, **options)


def test_sizes_that_can_be_enumerated_are_taken():
    for num_tokens, top_k in [(7, 4), (3, 25), (1, 10**9), (10**9, 1), (14, 2)]:
        check_enumerable(num_tokens, top_k, vocab_size=2**14)
    message = "pass num_tokens=2 with top_k=26, or top_k=25 with num_tokens=3"
    with pytest.raises(ValueError, match=message):
        check_enumerable(3, 26, vocab_size=2**14)
    with pytest.raises(ValueError, match="pass top_k=16384 with num_tokens=1"):
        check_enumerable(1, 10**9, vocab_size=2**15)


def test_texts_are_read_in_parts_of_which_none_is_lost():
    generator = SpeculativeGenerator(tiny(TARGET), None)
    sampling = Sampling(top_k=9, temperature=0.8)
    laws = text_laws(generator, [1, 2], 5, sampling)
    assert [len(law) for law in laws] == [6, 36, 216, 1296, 7776]
    for law in laws:
        assert sum(law.values()) == pytest.approx(1)
    last = max(laws[3])  # of the last part of several
    (after,) = text_laws(generator, [1, 2, *last], 1, sampling)
    for token, chance in after.items():
        assert laws[4][(*last, *token)] == pytest.approx(laws[3][last] * chance, rel=1e-5)
