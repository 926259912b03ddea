"""A sentinel over texts that are generated anyway: `evaluate(..., certify=True)` and rollouts."""

import copy
from dataclasses import replace

import pytest
import torch
from refusals import refused
from text_laws import DRAFT, PROMPT, TARGET, tiny
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
)

from specdec import (
    EnsembleSampler,
    ModelDrafter,
    NoDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    Target,
    certify,
    evaluate,
)
from specdec.lab.certificates import CertificateError, Sentinel
from specdec.lab.certificates.generator.along import MOST_FAR
from specdec.row_step import RowStep

PROMPTS = [PROMPT, [3], [5, 0, 2], [1, 1]]
RUN = {"max_new_tokens": 20, "temperature": 0.9, "top_p": 0.95, "batch_size": 4}


def generator(sampler="auto", target=None):
    drafter = ModelDrafter(tiny(DRAFT), num_draft_tokens=2)
    return SpeculativeGenerator(target or tiny(TARGET), drafter, sampler)


class Repeats(RejectionSampler):
    """Emits the last draft token once more in place of the extra token."""

    def accept(self, draft, target_logits, logits_filter, noise):
        verdict = super().accept(draft, target_logits, logits_filter, noise)
        index = verdict.num_accepted[:, None]
        return replace(verdict, tokens=verdict.tokens.scatter(1, index, draft.tokens[:, :1]))


def test_an_evaluation_with_a_sentinel_is_the_same_and_passes():
    plain, watched = (evaluate(generator(), PROMPTS, certify=c, **RUN) for c in (False, True))
    assert watched.stats.to_dict() == plain.stats.to_dict()
    assert watched.about["run"] == plain.about["run"]


def test_an_evaluation_of_a_wrong_rule_stops():
    wrong = generator(Repeats())
    evaluate(wrong, PROMPTS, samples=8, **RUN)
    with pytest.raises(CertificateError, match="do not have the target's distribution"):
        evaluate(wrong, PROMPTS, samples=8, certify=True, **RUN)


def test_greedy_evaluations_have_nothing_to_bet_on():
    with pytest.raises(ValueError, match="greedy texts have none; pass a temperature > 0"):
        evaluate(generator(), PROMPTS, certify=True, max_new_tokens=4)


def rollouts(one, count, **options):
    """Prompts, texts and the result of a call."""
    ids = torch.tensor([PROMPT]).expand(count, -1)
    options = {"max_new_tokens": 16, "seed": list(range(count)), **options}
    result = one.generate(ids, **options)
    pairs = zip(result.new_tokens.tolist(), result.lengths, strict=True)
    return [PROMPT] * count, [text[:length] for text, length in pairs], result


def test_processors_and_settings_of_hf_are_part_of_the_claim():
    own = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.8)])
    options = {"temperature": 1.1, "neutral": True, "logits_processor": own}
    prompts, texts, result = rollouts(generator(), 192, **options)
    sentinel = Sentinel(generator(), with_drafts=True)
    sentinel(prompts, texts, steps=result.steps, **options)
    assert sentinel.found.passed
    ignorant = Sentinel(generator(), raises=False)
    ignorant(prompts, texts, temperature=1.1, neutral=True)
    assert not ignorant.found.passed
    assert {"1", "2", "bonus"} <= sentinel.found.positions.keys()


class StaleSlot(Target):
    """Slot 2 of one row holds what slot 1 does."""

    def verify(self, cache, start, root, draft, **options):
        for table in (*cache.keys.values(), *cache.values.values()):
            table[0, 2] = table[0, 1]
        return super().verify(cache, start, root, draft, **options)


def test_a_stale_slot_is_seen_in_what_the_loop_draws_from():
    options = {"num_samples": 32, "max_new_tokens": 12, "audit_tokens": 1}
    report = certify(generator("rejection", StaleSlot(tiny(TARGET))), [PROMPT], **options)
    assert not report.text.passed
    assert report.text.loop_distance > 1e-4
    assert "of tokens beyond sqrt(eps), 0.20% is rounding" in str(report)


def wide_in_half_precision():
    """Of a width at which two sound computations in bfloat16 differ visibly."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 2000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 8}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, **heads, initializer_range=0.05)
    return LlamaForCausalLM(config).bfloat16().eval()


def held_against_the_model(target, temperature, reference=None):
    """What a sentinel finds of 16 texts."""
    options = {"temperature": temperature, "neutral": True, "max_new_tokens": 24}
    one = SpeculativeGenerator(target, PromptLookupDrafter(3), RejectionSampler())
    prompts, texts, result = rollouts(one, 16, output_scores=True, **options)
    sentinel = Sentinel(one, raises=False, reference=reference)
    sentinel(prompts, texts, scores=result.scores, **options)
    return sentinel.found


def test_rounding_is_no_fault_and_a_stale_slot_is_one():
    """At a low temperature rounding moves more tokens than a fault may."""
    model = wide_in_half_precision()
    for reference in (None, copy.deepcopy(model).float()):
        sound = held_against_the_model(model, 0.1, reference)
        assert sound.far_share > MOST_FAR, sound
        assert 0 < sound.rounding_share < 0.3, sound
        assert sound.passed, sound
    stale = held_against_the_model(StaleSlot(model), 1.0)
    assert stale.rounding_share < MOST_FAR < stale.far_share, stale
    assert not stale.passed, stale


def test_a_lossy_rule_states_what_it_moves():
    """Ensemble moves (1 - w) TV(q, p) at a drafted token, all of it to what the draft prefers."""
    options = {"temperature": 1.0, "neutral": True, "num_draft_tokens": 1}
    ensemble = generator(EnsembleSampler(0.5))
    prompts, texts, result = rollouts(ensemble, 256, **options)
    sentinel = Sentinel(ensemble, with_drafts=True, raises=False)
    sentinel(prompts, texts, steps=result.steps, **options)
    found = sentinel.found
    drafted = 1 - sum(row.count("bonus") for row in result.origins) / found.num_tokens
    expected = 0.5 * found.draft_distance * drafted
    assert abs(found.deviation.mean - expected) < 4 * found.deviation.error < expected
    assert "lossy, as declared" in str(found)
    drafted, bonus = found.losses["1"], found.losses["bonus"]
    assert drafted.mean > 4 * drafted.error
    assert abs(bonus.mean) < 4 * bonus.error
    assert f"1: {drafted.mean:.2%}" in str(found)


def test_a_generator_without_drafts_is_judged_by_the_target_alone():
    plain = SpeculativeGenerator(tiny(TARGET), NoDrafter())
    options = {"temperature": 1.0, "neutral": True}
    prompts, texts, _ = rollouts(plain, 64, **options)
    sentinel = Sentinel(plain, with_drafts=True)
    sentinel(prompts, texts, **options)
    assert sentinel.found.draft_distance == 0
    assert "of probability moved to the likeliest token" in str(sentinel.found)


def test_a_pass_with_a_small_p_has_a_comment():
    sentinel = Sentinel(generator())
    prompts, texts, _ = rollouts(generator(), 8, temperature=1.0, neutral=True)
    sentinel(prompts, texts, temperature=1.0, neutral=True)
    found = sentinel.found
    assert "p is small" not in str(found)
    small = replace(found, log_peak=8.0)  # p is 0.00034
    assert small.passed
    assert "p is small: one sound generator in 2981 comes so far" in str(small)
    assert "p is small" not in str(replace(found, log_peak=20.0))  # which fails


def test_half_precision_is_allowed_to_round():
    model = tiny(TARGET)
    half = SpeculativeGenerator(Target(type(model)(model.config).eval().bfloat16()), None)
    options = {"temperature": 1.0, "neutral": True}
    prompts, texts, result = rollouts(half, 64, **options, output_scores=True)
    sentinel = Sentinel(half)
    sentinel(prompts, texts, scores=result.scores, **options)
    assert sentinel.found.passed
    assert sentinel.found.loop_distance < 0.01


REFUSED = [
    ("no text was bet on yet", lambda judge: judge.found),
    ("leave it out together with its steps", lambda judge: judge([[1]], [[]], steps=[[]], **HOT)),
    ("greedy texts are not drawn", lambda judge: judge([[1]], [[2]], do_sample=False)),
    ("got 1 prompts and 2 texts; pass the prompt", lambda judge: judge([[1]], [[2], [3]], **HOT)),
    (
        "temperature has different values for different rows",
        lambda judge: judge([[1], [2]], [[2], [3]], temperature=[0.5, 1.0]),
    ),
    ("false_alarm", lambda judge: Sentinel(generator(), false_alarm=1.0)),
    ("generator must be the SpeculativeGenerator .. got 'x'", lambda judge: Sentinel("x")),
    ("reference must be a model of HF's .. got 'x'", lambda judge: sentinel_of(reference="x")),
    ("tolerance must be a number >= 0, got -1", lambda judge: sentinel_of(tolerance=-1)),
    (
        "a token of texts[0] must be .. in 0..5, got 6; were",
        lambda judge: judge([[1]], [[2, 6]], **HOT),
    ),
    ("a token of prompts[0] must be .. got -1", lambda judge: judge([[-1]], [[2]], **HOT)),
    ("texts must be lists of token ids", lambda judge: judge([[1]], [[2.5]], **HOT)),
    ("prompts must be lists of token ids", lambda judge: judge([1], [[2]], **HOT)),
    (
        "steps have [2] new tokens and texts [1]",
        lambda judge: judge([[1]], [[2]], steps=[[RowStep([1], 1, [1, 2])]], **HOT),
    ),
    (
        "scores must have 2 columns or more, of 1 rows",
        lambda judge: judge([[1]], [[2, 3]], scores=[torch.zeros(1, 6)], **HOT),
    ),
    (
        "nobody reads row_inputs['bias']",
        lambda judge: judge([[1]], [[2]], row_inputs={"bias": [1]}, **HOT),
    ),
]
HOT = {"temperature": 1.0}


def sentinel_of(**options):
    return Sentinel(generator(), **options)


@pytest.mark.parametrize(("words", "call"), REFUSED)
def test_what_cannot_be_judged_is_refused(words, call):
    judge = sentinel_of()
    with refused(words):
        call(judge)
    judge([[1]], [[]], **HOT)  # nothing to bet on
