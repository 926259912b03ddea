"""Options as NumPy and torch have them, and values at the end of their range."""

import numpy as np
import pytest
import torch
from architectures import build
from drafting import perturbed
from transformers import GenerationConfig

from specdec import ModelDrafter, SpeculativeGenerator, zoo
from specdec.lab.evaluation import evaluate

MODEL = build("llama")
PROMPTS = torch.tensor([[5, 6, 7], [8, 9, 10]])
PLAIN = {
    "max_new_tokens": 6,
    "min_new_tokens": 2,
    "temperature": 0.5,
    "top_k": 20,
    "top_p": 0.75,
    "min_p": 0.0625,
    "seed": 3,
    "eos_token_id": 11,
    "pad_token_id": 0,
    "num_return_sequences": 2,
    "num_draft_tokens": 2,
    "draft_probs": True,
    "do_sample": True,
}


@pytest.fixture(scope="module")
def generator():
    return SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL), 3))


@pytest.mark.parametrize(
    "make",
    [np.asarray, lambda x: np.asarray(x)[()], torch.tensor],
    ids=["array", "scalar", "torch"],
)
def test_options_may_be_numbers_of_numpy_and_torch(generator, make):
    expected = generator.generate(PROMPTS, **PLAIN).sequences
    for name, value in PLAIN.items():
        options = PLAIN | {name: make(value)}
        assert generator.generate(PROMPTS, **options).sequences.equal(expected), name


@pytest.mark.parametrize("make", [np.array, torch.tensor, lambda x: [*map(np.float32, x)]])
def test_values_of_rows_may_be_arrays(generator, make):
    rows = {"temperature": [0.5, 1.0], "top_p": [0.75, 1.0], "max_new_tokens": 5}
    expected = generator.generate(PROMPTS, **rows, seed=[1, 2]).sequences
    given = {name: make(rows[name]) for name in ("temperature", "top_p")}
    seeds = np.array([1, 2], dtype=np.uint64)
    found = generator.generate(PROMPTS, **rows | given, seed=seeds).sequences
    assert found.equal(expected)
    ends = generator.generate(PROMPTS, **rows, seed=[1, 2], eos_token_id=np.array([4, 30]))
    wanted = generator.generate(PROMPTS, **rows, seed=[1, 2], eos_token_id=[4, 30])
    assert ends.sequences.equal(wanted.sequences)


def test_parts_take_numbers_of_numpy(generator):
    drafter = ModelDrafter(MODEL, np.int64(2), draft_temperature=np.float32(0.5))
    SpeculativeGenerator(MODEL, drafter, prefill_chunk_size=np.int32(64)).generate(
        PROMPTS, max_new_tokens=3, temperature=1.0, seed=0
    )
    options = {"max_new_tokens": np.int64(3), "seed": np.int64(1), "batch_size": np.int64(2)}
    found = evaluate(generator, PROMPTS.tolist(), temperature=np.float32(0.5), **options)
    options = {name: int(value) for name, value in options.items()}
    other = evaluate(generator, PROMPTS.tolist(), temperature=0.5, **options)
    assert found.stats.to_dict() == other.stats.to_dict()


@pytest.mark.parametrize("value", [np.float64(1.5), np.bool_(True), torch.tensor([1]), "1"])
def test_what_is_no_integer_stays_none(generator, value):
    with pytest.raises(TypeError, match="num_draft_tokens must be an integer"):
        generator.generate(PROMPTS, max_new_tokens=3, num_draft_tokens=value)


@pytest.mark.parametrize("least", [1e-37, 1e-45, 5e-324])
def test_a_temperature_too_small_for_float32_is_refused_by_name(generator, least):
    for options in ({"temperature": least}, {"temperature": [1.0, least]}):
        with pytest.raises(ValueError, match=r"temperature must be 0, which is greedy, or a num"):
            generator.generate(PROMPTS, max_new_tokens=3, **options)
    with pytest.raises(ValueError, match="draft_temperature must be a number >= 1e-30"):
        ModelDrafter(MODEL, 2, draft_temperature=least)


def test_the_smallest_temperature_is_greedy_in_effect(generator):
    greedy = generator.generate(PROMPTS, max_new_tokens=8, do_sample=False).sequences
    for least in (1e-30, 1e-20):
        options = {"max_new_tokens": 8, "temperature": least, "seed": 0}
        assert generator.generate(PROMPTS, **options).sequences.equal(greedy)
    sharp = SpeculativeGenerator(MODEL, ModelDrafter(MODEL, 3, draft_temperature=1e-30))
    result = sharp.generate(PROMPTS, max_new_tokens=8, temperature=1e-30, seed=0)
    assert result.sequences.equal(greedy)
    assert result.stats.acceptance_rate == 1


def test_token_healing_is_refused_in_words_that_say_what_to_do(generator):
    target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    generator = SpeculativeGenerator(target, None)
    ids = tokenizer("def main", return_tensors="pt").input_ids
    config = GenerationConfig(token_healing=True, max_new_tokens=3)
    with pytest.raises(ValueError, match=r"heal them first, with input_ids = model.heal_tokens"):
        generator.generate(ids, generation_config=config, tokenizer=tokenizer)
    with pytest.raises(TypeError, match=r"'token_healing': it changes the prompts"):
        generator.generate(ids, token_healing=True, tokenizer=tokenizer)
    healed = target.heal_tokens(ids, tokenizer)
    assert generator.generate(healed, max_new_tokens=3).sequences.shape[1] == healed.shape[1] + 3


def test_an_adapter_of_a_model_without_any_is_refused_in_words(generator):
    for names in (["one", "two"], ["__base__", "two"]):
        with pytest.raises(ValueError, match=r"names adapters, and LlamaForCausalLM has no layers"):
            generator.generate(PROMPTS, max_new_tokens=3, row_inputs={"adapter": names})
    with pytest.raises(TypeError, match=r"nobody reads row_inputs\['adapter'\]"):
        generator.generate(PROMPTS, max_new_tokens=3, row_inputs={"adapter": [0, 1]})
