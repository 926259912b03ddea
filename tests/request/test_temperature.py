"""One grammar of temperature: above 0 samples and 0 is greedy, with `do_sample` or without it.
Behind HF's own `generate` HF decides, which ignores a temperature that is passed alone.
"""

import pytest
import torch
from architectures import build
from drafting import perturbed
from transformers import GenerationConfig

from specdec import ModelDrafter, SpeculativeGenerator, evaluate

MODEL = build("llama")
GENERATOR = SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL), 3))
IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])
SAMPLES = GenerationConfig(do_sample=True, temperature=0.7, pad_token_id=0)
GREEDY = GenerationConfig(do_sample=False, pad_token_id=0)


def written(**options):
    return GENERATOR.generate(IDS, max_new_tokens=12, seed=[1, 2], **options).sequences.tolist()


def with_own(monkeypatch, config):
    monkeypatch.setattr(MODEL, "generation_config", config)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8},
        {"temperature": 1},
        {"temperature": [0.8, 1.3]},
        {"temperature": torch.tensor([0.0, 1.3])},
        {"temperature": 0.8, "top_p": 0.7, "top_k": [5, 0]},
        {"temperature": 0.8, "neutral": True},
    ],
    ids=str,
)
def test_a_temperature_above_zero_samples_with_do_sample_or_without_it(options, monkeypatch):
    found = written(**options)
    assert found == written(**options, do_sample=True) != written(do_sample=False)
    with_own(monkeypatch, GREEDY)  # a keyword goes before what the model ships
    assert written(**options) == found


@pytest.mark.parametrize("temperature", [0.8, [0.8, 1.3], [0.8, 1.3, 0.7, 0.0]], ids=str)
def test_a_temperature_above_zero_samples_several_texts_of_a_prompt(temperature):
    options = {"temperature": temperature, "num_return_sequences": 2}
    found = written(**options)
    assert found == written(**options, do_sample=True)
    assert len({tuple(row) for row in found}) == 4


@pytest.mark.parametrize("config", [GREEDY, SAMPLES], ids=["greedy model", "sampling model"])
@pytest.mark.parametrize("zero", [0, 0.0, [0.0, 0.0]], ids=str)
def test_temperature_zero_is_greedy_whatever_else_is_said(zero, config, monkeypatch):
    with_own(monkeypatch, config)
    greedy = written(do_sample=False)
    assert written(temperature=zero) == greedy
    for do_sample in (False, True):
        assert written(temperature=zero, do_sample=do_sample) == greedy


def test_without_a_temperature_do_sample_and_the_configuration_decide(monkeypatch):
    with_own(monkeypatch, SAMPLES)
    assert written() == written(temperature=0.7) == written(do_sample=True)
    assert written(do_sample=False) == written(temperature=0)
    with_own(monkeypatch, GREEDY)
    greedy = written(temperature=0)
    with pytest.warns(UserWarning, match=r"seed has no effect: the call is greedy; pass do_sample"):
        assert written() == greedy
    with pytest.warns(UserWarning, match="seed has no effect"):  # as in HF
        assert written(generation_config=GenerationConfig(temperature=0.7)) == greedy


@pytest.mark.parametrize(
    "said", [{"do_sample": False}, {"generation_config": GREEDY}], ids=["keyword", "configuration"]
)
def test_a_call_that_says_both_is_refused(said):
    with pytest.raises(
        ValueError, match=r"do_sample=False is greedy, and temperature=\[0.0, 0.8\]"
    ):
        written(temperature=[0.0, 0.8], **said)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_measurements_have_the_same_grammar(temperature):
    options = {"max_new_tokens": 8, "temperature": temperature}
    runs = [
        evaluate(GENERATOR, IDS, **options, **said)
        for said in ({}, {"do_sample": None}, {"do_sample": temperature > 0})
    ]
    for run in runs[1:]:
        assert [row.new_tokens for row in run.rows] == [row.new_tokens for row in runs[0].rows]
        assert run.about["run"] == runs[0].about["run"]  # so a saved run goes on with either


def test_behind_the_hook_a_temperature_alone_is_ignored_as_hf_does():
    options = {"max_new_tokens": 12, "temperature": 0.8, "pad_token_id": 0}
    found = MODEL.generate(IDS, custom_generate=GENERATOR, **options)
    assert found.equal(MODEL.generate(IDS, **options))
