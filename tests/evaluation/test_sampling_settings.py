"""A target's `generation_config` changes what `generate` draws from, and no measurement: each of
HF's sampling settings in turn, in the configuration of the same small target.
"""

import copy
import inspect
import re
from dataclasses import asdict

import pytest
import torch
from agreement import agree
from text_laws import DRAFT, PROMPT, TARGET, VOCAB, tiny
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
)

from examples.replay import every_position, replay
from specdec import (
    BlockSampler,
    ModelDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    certify,
    evaluate,
)
from specdec.hf.generation import BEFORE_FILTERS, BESIDE_FILTERS, FILTERS, UNSUPPORTED
from specdec.lab.evaluation import HFGenerate, compare
from specdec.lab.trace import Trace
from specdec.request.sampling import Sampling

SETTINGS = {
    "temperature": 0.4,
    "top_k": 2,
    "top_p": 0.5,
    "min_p": 0.4,
    "top_h": 0.5,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.2,
    "eta_cutoff": 0.2,
    "renormalize_logits": True,
    "sequence_bias": [[[2], 3.0]],
    "repetition_penalty": 1.8,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[1]],
    "min_length": 12,
    "min_new_tokens": 6,
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 5,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (2, 1.5),
    "suppress_tokens": [1, 2],
    "begin_suppress_tokens": [4],
    "do_sample": False,
    "num_return_sequences": 2,
    "max_new_tokens": 7,
}
ONLY_MEASURED = {
    "guidance_scale": 1.5,
    "watermarking_config": {"context_width": 1},
    "encoder_repetition_penalty": 1.5,
    "encoder_no_repeat_ngram_size": 2,
}
"""Settings with processors that keep state or read an encoder's input."""
PROMPTS = [PROMPT, [3, 0]]
MODEL = copy.copy(tiny(TARGET))
DRAFTER = ModelDrafter(tiny(DRAFT), 2)
GENERATOR = SpeculativeGenerator(MODEL, DRAFTER, RejectionSampler())
BLOCKS = SpeculativeGenerator(GENERATOR.target, DRAFTER, BlockSampler())


def ship(**settings):
    """Gives the target a configuration, with an end-of-sequence id, as some settings need one."""
    settings = {"do_sample": True, "eos_token_id": VOCAB - 1, "pad_token_id": 0} | settings
    MODEL.generation_config = GenerationConfig(**settings)


def figures(stats):
    return [stats.steps, stats.emitted, stats.accepted]


def measured():
    """Figures of `evaluate` and `compare`, and the text of HF in the comparison."""
    options = {"max_new_tokens": 8, "temperature": 1.0, "seed": 3}
    found = evaluate(GENERATOR, PROMPTS, **options)
    ways = {"specdec": GENERATOR, "HF": HFGenerate(MODEL)}
    ours, theirs = compare(ways, PROMPTS, rounds=1, **options).runs
    return figures(found.stats), figures(ours.stats), [row.new_tokens for row in theirs.rows]


ship()
EXPECTED = measured()


def test_no_setting_that_makes_logits_processors_is_missing():
    source = inspect.getsource(GenerationMixin._get_logits_processor)
    names = set(re.findall(r"generation_config\.([a-z]\w*)", source))
    known = {*FILTERS, *BEFORE_FILTERS, *BESIDE_FILTERS}
    others = {"do_sample", "num_beams", "num_return_sequences", "max_length", "use_cache"}
    assert names - known - UNSUPPORTED.keys() <= others  # those are refused by name
    assert known <= {*SETTINGS, *ONLY_MEASURED}


@pytest.mark.parametrize("group", range(4))
def test_measurements_do_not_depend_on_the_targets_configuration(group):
    ship(**dict([*(SETTINGS | ONLY_MEASURED).items()][group::4]))
    with_evaluate, with_compare, texts = measured()
    assert with_evaluate == with_compare == EXPECTED[0]
    assert texts == EXPECTED[2]


@pytest.mark.parametrize(
    "settings",
    [{"do_sample": False}, SETTINGS | ONLY_MEASURED | {"do_sample": True}],
    ids=["do_sample", "all"],
)
def test_a_sound_generator_passes_whatever_its_target_ships(settings):
    ship(**settings)
    quick = {"num_samples": 64, "max_new_tokens": 8, "audit_tokens": 3}
    report = certify(GENERATOR, [PROMPT], **quick)
    assert report.passed, report
    assert "drawn with: temperature 1.0" in str(report)


def traced(generator, first_seed, **options):
    """A run of 24 rows with whatever the target ships."""
    ids, rows = torch.tensor([PROMPT]), 24
    options = {"max_new_tokens": 12, "do_sample": True} | options
    seeds = list(range(first_seed, first_seed + rows))
    return generator.generate(ids.expand(rows, -1), num_return_sequences=1, seed=seeds, **options)


REPLAYED = ("temperature", "top_k", "typical_p", "repetition_penalty", "min_new_tokens")


@pytest.mark.parametrize("name", REPLAYED)  # of each kind: ours, HF's own, before and beside these
def test_a_replay_draws_from_what_the_run_drew_from(name, tmp_path):
    """Also when it is read from a file, and the target ships something else by then."""
    ship(**{name: SETTINGS[name]})
    traced(GENERATOR, 0, trace=True).trace.to_jsonl(tmp_path / "trace.jsonl")
    real = traced(BLOCKS, 1000).stats
    ship(top_p=0.3)
    trace = Trace.from_jsonl(tmp_path / "trace.jsonl")
    whole = every_position(GENERATOR, trace)
    read = [their.extra_target_prob for row in whole.numbers for their in row]
    assert read == pytest.approx(run_probs(trace), abs=1e-5)
    found = replay(whole, num_draft_tokens=2, sampler=BlockSampler())
    assert agree(found.acceptance_length, real, errors=4)


def run_probs(trace):
    """The target's probability of each token of the texts, as the run itself noted them."""
    probs = []
    for steps, numbers in zip(trace.steps, trace.numbers, strict=True):
        for step, their in zip(steps, numbers, strict=True):
            own = [*their.target_probs[: step.num_accepted], their.extra_target_prob]
            probs += own[: len(step.new_tokens)]
    return probs


def test_a_replay_goes_on_past_ids_that_ended_nothing_in_the_run():
    ship()
    trace = traced(GENERATOR, 0, trace=True, eos_token_id=[]).trace
    assert any(VOCAB - 1 in step.new_tokens[:-1] for row in trace for step in row)
    assert [len(row) for row in every_position(GENERATOR, trace)] == [12] * 24


def test_a_replay_of_greedy_text_by_another_target_is_refused():
    ship()
    ids = torch.tensor([PROMPT])
    trace = GENERATOR.generate(ids, max_new_tokens=8, do_sample=False, trace=True).trace
    other = SpeculativeGenerator(tiny(DRAFT), None)
    with pytest.raises(ValueError, match="does not write the text of row 0; pass the generator"):
        every_position(other, trace)


@pytest.mark.parametrize("temperature", [0.7, [0.0, 0.5, 1.4]], ids=str)
def test_the_record_says_what_was_drawn_from(temperature):
    ship(top_p=0.9, repetition_penalty=1.3)
    ids = torch.tensor([PROMPT] * 3)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2)])
    options = {"max_new_tokens": 4, "do_sample": True, "trace": True, "temperature": temperature}
    trace = GENERATOR.generate(ids, logits_processor=processors, **options).trace
    record = Sampling(**trace.about["sampling"])
    expected = {"top_k": 50, "top_p": 0.9, "eos_token_id": [VOCAB - 1]}
    expected |= {"settings": {"repetition_penalty": 1.3}, "temperature": temperature}
    assert record == Sampling(processors=["RepetitionPenaltyLogitsProcessor"], **expected)
    with pytest.raises(ValueError, match=r"logits processors \(RepetitionPenalty.*, which a rec"):
        every_position(GENERATOR, trace)
    trace = GENERATOR.generate(ids, neutral=True, **options).trace
    expected = Sampling(temperature=temperature, eos_token_id=[VOCAB - 1])
    assert trace.about["sampling"] == asdict(expected)


def test_a_run_does_not_go_on_with_other_ends_and_goes_on_whatever_else_the_target_ships(tmp_path):
    options = {"max_new_tokens": 6, "temperature": 1.0, "output": tmp_path / "run.jsonl"}
    ship()
    expected = evaluate(GENERATOR, PROMPTS, **options)
    ship(top_p=0.2)
    assert figures(evaluate(GENERATOR, PROMPTS, **options).stats) == figures(expected.stats)
    with pytest.raises(ValueError, match=r"sampling\.top_k \(0 there, 50 here\), sampling\.top_p"):
        evaluate(GENERATOR, PROMPTS, neutral=False, **options)
    ship(eos_token_id=4)
    with pytest.raises(ValueError, match=r"differ in sampling.eos_token_id \(\[5\] there, \[4\]"):
        evaluate(GENERATOR, PROMPTS, **options)
