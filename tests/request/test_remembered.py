"""A call of options that were resolved before is the call that HF resolves anew."""

import copy

import pytest
import torch
from architectures import VOCAB, build
from drafting import ragged_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from specdec import SpeculativeGenerator, Target
from specdec.request.call import read_request

OPTIONS = [
    {"max_new_tokens": 3},
    {"max_new_tokens": 5},
    {"max_new_tokens": 5, "do_sample": True},
    {"max_new_tokens": 5, "do_sample": True, "temperature": 0.7, "top_p": 0.9},
    {"max_new_tokens": 5, "do_sample": True, "temperature": 0.7, "top_k": 4, "min_p": 0.1},
    {"max_new_tokens": 5, "temperature": [0.0, 0.5], "do_sample": True},
    {"max_new_tokens": 5, "eos_token_id": [3, 4]},
    {"max_new_tokens": 5, "eos_token_id": []},
    {"max_new_tokens": 5, "neutral": True, "do_sample": True},
    {"max_new_tokens": 5, "generation_config": GenerationConfig(repetition_penalty=1.5)},
    {"max_new_tokens": 5, "min_new_tokens": 2},
    {"max_new_tokens": 5, "num_return_sequences": 2, "do_sample": True},
    {"max_new_tokens": 5, "top_p": None, "do_sample": True},
    {"generation_config": GenerationConfig(max_length=24)},
    {},
]
CHANGES = [{}, {"eos_token_id": 7}, {"do_sample": True, "top_k": 3, "temperature": 0.5}]


def described(request) -> list:
    """All of a request that options decide."""
    others = [[type(one), vars(one)] for one in request.criteria]
    processors = [type(one) for one in getattr(request.processors, "processors", ())]
    kept = "max_new_tokens", "sampling", "logits_filter", "eos", "pad", "is_alone", "outputs"
    return [*(getattr(request, name) for name in kept), request.lengths, others, processors]


@settings(max_examples=6, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(OPTIONS) - 1), st.integers(2, 12), st.integers(0, len(CHANGES) - 1)
        ),
        min_size=2,
        max_size=8,
    )
)
def test_calls_in_any_order_are_what_each_is_alone(calls):
    model = build("llama")
    target, own = Target(model), copy.deepcopy(model.generation_config)
    for index, length, change in calls:
        model.generation_config = copy.deepcopy(own)
        model.generation_config.update(**CHANGES[change])
        inputs = *ragged_prompts(VOCAB, length, 2), dict(OPTIONS[index])
        target_of_one_call = copy.copy(target)
        target_of_one_call.resolved = []
        found, expected = read_request(target, *inputs), read_request(target_of_one_call, *inputs)
        assert described(found) == described(expected)


def test_hf_is_asked_once_for_calls_of_the_same_options(monkeypatch):
    model, asked = build("llama"), []
    generate = type(model).generate

    def counted(*args, **options):
        asked.append(1)
        return generate(*args, **options)

    monkeypatch.setattr(type(model), "generate", counted)
    generator = SpeculativeGenerator(model, None)
    before = len(asked)
    for length in (4, 9, 6):
        texts = ragged_prompts(VOCAB, length)
        result = generator.generate(*texts, max_new_tokens=4, do_sample=True, seed=1)
        assert result.sequences.shape[1] <= length + 4
    assert len(asked) - before == 1
    model.generation_config.temperature = 0.5  # in place
    generator.generate(*texts, max_new_tokens=4, do_sample=True, seed=1)
    assert len(asked) - before == 2


@pytest.mark.parametrize("of_class", [False, True])
def test_a_function_of_the_model_that_somebody_replaces_is_asked(of_class, monkeypatch):
    model, ids = build("llama"), torch.tensor([[5, 6]])
    generator = SpeculativeGenerator(model, None)
    generator.generate(ids, max_new_tokens=4, eos_token_id=[])
    processors, asked = model._get_logits_processor, []
    owner = type(model) if of_class else model

    def noted(*args, **options):
        asked.append(1)
        return processors(*args[of_class:], **options)

    monkeypatch.setattr(owner, "_get_logits_processor", noted)
    generator.generate(ids, max_new_tokens=4, eos_token_id=[])
    assert asked


@pytest.mark.parametrize("change", [lambda g: g.refresh(), copy.deepcopy], ids=["refresh", "copy"])
def test_a_generator_that_is_refreshed_or_copied_asks_again(change):
    generator = SpeculativeGenerator(build("llama"), None)
    inputs = ragged_prompts(VOCAB, 4, 6)
    first = generator.generate(*inputs, max_new_tokens=4)
    other = change(generator) or generator
    assert not other.target.resolved
    assert other.generate(*inputs, max_new_tokens=4).sequences.equal(first.sequences)


def test_a_step_of_options_costs_no_more_than_eight_kinds():
    generator, ids = SpeculativeGenerator(build("llama"), None), torch.tensor([[5, 6]])
    for count in range(1, 12):
        generator.generate(ids, max_new_tokens=count)
    assert len(generator.target.resolved) == 8
