"""`certify(generator, prompts)` passes sound generators and fails planted bugs.

The target has six tokens. Sound generators get 64 texts of 16 tokens and a false-alarm rate of
1e-6; planted bugs, whose total variation is some per cent, get up to four times as many.
"""

import copy
from dataclasses import replace

import pytest
import torch
from diagonal import diagonal
from text_laws import DRAFT, PROMPT, TARGET, VOCAB, tiny
from transformers import GenerationConfig
from transformers.generation import configuration_utils

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
from specdec.lab.certificates import certify
from specdec.lab.certificates.generator.text import audit_text
from specdec.samplers import LogitsFilter
from specdec.types import Draft

QUICK = {"num_samples": 64, "max_new_tokens": 16, "audit_tokens": 12, "settings": [{"top_k": 4}]}


def drafter():
    return ModelDrafter(tiny(DRAFT), num_draft_tokens=2)


def certify_run(drafter, sampler="auto", **options):
    generator = SpeculativeGenerator(tiny(TARGET), drafter, sampler)
    return certify(generator, [PROMPT], **QUICK | options)


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
    assert (report.text.num_tokens, report.text.num_texts) == (64 * 16, 64)
    assert report.text.loop_distance < 1e-6
    assert 0.02 < report.text.detectable < 0.15
    assert str(report).startswith("PASS")


def test_scores_that_a_certificate_asks_for_are_no_reason_for_a_warning(monkeypatch):
    said = []
    monkeypatch.setattr(configuration_utils.logger, "warning_once", said.append)
    certify_run(drafter(), num_samples=2, settings=[{"temperature": 1.0}])
    assert not said
    GenerationConfig(output_scores=True).validate()  # which HF warns about
    assert said


def test_prompts_of_unequal_length_and_settings_in_turn_are_certified_together():
    generator = SpeculativeGenerator(tiny(TARGET), drafter())
    settings = [{"temperature": 0.7}, {"top_p": 0.9}, {"temperature": 1.3, "min_p": 0.1}]
    few = {"num_samples": 20, "audit_tokens": 8, "batch_size": 13, "settings": settings}
    report = certify(generator, [PROMPT, [3], [5, 0]], **QUICK | few)
    assert report.passed
    assert report.greedy.num_tokens == 3 * 8
    assert report.text.num_texts == 60
    assert "drawn with: temperature 0.7; top_p 0.9; temperature 1.3, min_p 0.1" in str(report)


def test_a_bias_that_is_to_be_seen_says_what_it_takes_or_is_worked_for():
    report = certify_run(drafter(), target_bias=0.03)
    needed = report.text.tokens_for(0.03)
    assert needed > report.text.num_tokens
    assert f"to see 3.00% takes {needed} tokens in all" in str(report)
    surer = certify_run(drafter(), target_bias=0.03, until_sure=True)
    assert surer.passed
    assert surer.text.detectable <= 0.03 < report.text.detectable
    assert 0.7 * needed < surer.text.num_tokens < 1.3 * needed + 1024
    assert "to see" not in str(surer)


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
        plain = replace(drawing, logits_filter=LogitsFilter(drawing.logits_filter.batch_size))
        unfiltered = super().propose(context, state, plain)
        return Draft(draft.tokens, unfiltered.probs)


@pytest.mark.parametrize(
    ("top_k", "wrong"), diagonal([2, 3, 4], [ArgmaxWithSoftLaw, FilterOnTheTokensOnly])
)
def test_a_drafter_whose_law_is_not_that_of_its_tokens_fails(wrong, top_k):
    options = {"num_samples": 256, "settings": [{"top_k": top_k}]}
    report = certify_run(wrong(tiny(DRAFT), num_draft_tokens=1), **options)
    assert report.greedy.passed
    assert not report.text.passed
    assert report.text.far_share == 0  # the rule is wrong, not the loop's logits


class PrefersTheHighestId(RejectionSampler):
    """Breaks ties the other way round."""

    def accept_greedily(self, draft, target_logits):
        last = target_logits.shape[-1] - 1
        reversed_draft = Draft(last - draft.tokens, None, draft.num_valid)
        verdict = super().accept_greedily(reversed_draft, target_logits.flip(-1))
        tokens = torch.where(verdict.tokens < 0, verdict.tokens, last - verdict.tokens)
        return type(verdict)(tokens, verdict.num_accepted, verdict.num_drafted)


class PrefersTheSecondBest(RejectionSampler):
    """Emits the runner-up."""

    def accept_greedily(self, draft, target_logits):
        best = target_logits.argmax(dim=-1, keepdim=True)
        return super().accept_greedily(draft, target_logits.scatter(-1, best, -1e9))


class LooksAtTheWholeBatch(RejectionSampler):
    """Accepts a whole draft of every row, where some row is sampled."""

    def forward(self, draft, target_logits, logits_filter, noise):
        if not logits_filter.is_greedy:
            target_logits = target_logits.clone()
            target_logits[:, :-1].scatter_(2, draft.tokens[..., None], 99.0)
        return super().forward(draft, target_logits, logits_filter, noise)


def test_greedy_rows_are_audited_beside_sampled_ones_too():
    audit = audit_of(tiny(TARGET), LooksAtTheWholeBatch())
    assert not audit.passed
    assert "prompt 0, beside a sampled row, new token" in str(audit)
    assert audit_of(tiny(TARGET), RejectionSampler()).passed


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
    assert audit.num_ties > 0
    assert "a tie within rounding: both tokens are within it of the top" in str(audit)


class WrongTarget(Target):
    """The loop's logits are off by far more than rounding."""

    def verify(self, *args, **kwargs):
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
    ("temperature", [[1]], {"settings": [{"temperature": 0.0}]}),
    (
        "settings.1. has num_return_sequences=2.*pass num_samples",
        [[1]],
        {"settings": [{"top_k": 2}, {"num_return_sequences": 2}]},
    ),
    (
        "settings.0. has max_new_tokens=5, which .* decides; pass max_new_tokens beside settings",
        [[1]],
        {"settings": [{"max_new_tokens": 5}]},
    ),
    ("has seed=3.*each text has a seed of its own", [[1]], {"settings": [{"seed": 3}]}),
    (r"settings\[0\] is 3", [[1]], {"settings": [3]}),
    ("settings must be a list of options.*got 3", [[1]], {"settings": 3}),
    ("reference must be a model of HF's.*got 'x'", [[1]], {"reference": "x"}),
    (
        "position_offset.. must have one value for each of the 1 prompts, got 3",
        [[1]],
        {"settings": [{"row_inputs": {"position_offset": 3}}]},
    ),
    (
        "position_offset.. must have one value for each of the 1 prompts, got .3, 4.",
        [[1]],
        {"settings": [{"row_inputs": {"position_offset": [3, 4]}}]},
    ),
    ("row_inputs must be a dict", [[1]], {"settings": [{"row_inputs": [3]}]}),
    ("target_bias", [[1]], {"target_bias": 1.0}),
    ("until_sure goes on until target_bias.*pass one", [[1]], {"until_sure": True}),
    ("settings must be a list of options", [[1]], {"settings": {"temperature": 1.0}}),
]


@pytest.mark.parametrize(("message", "prompts", "options"), SETTINGS)
def test_settings_that_cannot_be_right_are_refused(message, prompts, options):
    with pytest.raises((ValueError, TypeError), match=message):
        certify(SpeculativeGenerator(tiny(TARGET), None), prompts, **options)


class Favourite(NoDrafter):
    """Proposes the id that a call brought for each row, or 0."""

    num_draft_tokens, row_inputs = 2, ("favourite",)
    seen: set

    def propose(self, context, state, drawing):
        own = context.row_inputs.get("favourite", context.tokens[:, 0] * 0)
        self.seen.update(zip(context.tokens[:, 0].tolist(), own.tolist(), strict=True))
        return Draft(own[:, None].expand(-1, drawing.num_draft_tokens).clone())


def test_row_inputs_follow_their_prompts_into_every_batch():
    own = Favourite()
    own.seen = set()
    generator = SpeculativeGenerator(tiny(TARGET), own, "rejection")
    settings = [{"row_inputs": {"favourite": [4, 2]}}]
    options = {"num_samples": 3, "max_new_tokens": 2, "audit_tokens": 2, "batch_size": 4}
    report = certify(generator, [[0, 1], [0, 3]], settings=settings, **options)
    assert report.passed, report
    assert "drawn with: row_inputs favourite" in str(report)
    assert {(1, 4), (3, 2)} <= own.seen  # the prompts' last tokens
