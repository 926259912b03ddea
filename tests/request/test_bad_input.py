"""Bad input is refused before anything is computed, with a message that says what to do.

Every message names what was expected, what was given, or the way out; the model is left as it was
found. What looks bad but is not (padded vocabularies, a draft model with fewer positions, logits
that nobody reads) must work.
"""

import math

import pytest
import torch
import transformers
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from fingerprint import fingerprint
from transformers import GenerationConfig

from specdec import (
    EagleDrafter,
    EnsembleSampler,
    ModelDrafter,
    NoDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    Target,
    TypicalSampler,
    zoo,
)
from specdec.drafters.model import check_same_tokenizer
from specdec.samplers import Noise, Warp

MODEL = build("llama")
GENERATOR = SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL)))
IDS, MASK = ragged_prompts(VOCAB, 2, 5)
TOO_LONG = torch.ones(1, 129, dtype=torch.long)
WITH_HOLE = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 1]])


@pytest.fixture(autouse=True)
def _nothing_changes_the_model():
    before = fingerprint(MODEL)
    yield
    assert fingerprint(MODEL) == before


def cell(row: int, column: int, value: int) -> torch.Tensor:
    ids = IDS.clone()
    ids[row, column] = value
    return ids


PROMPTS = {
    "empty": ((IDS[:, :0],), ValueError, r"empty \(shape \[2, 0\]\); pass at least one token"),
    "no rows": ((IDS[:0],), ValueError, r"empty \(shape \[0, 5\]\)"),
    "1-D": ((IDS[0],), ValueError, r"\[B, T\], got shape \[5\]; add a batch dimension"),
    "float": ((IDS.float(),), TypeError, "integer token ids, got dtype torch.float32"),
    "bool": ((IDS.bool(),), TypeError, "integer token ids, got dtype torch.bool"),
    "list": ((IDS.tolist(),), TypeError, "integer tensor .*got list; tokenizer"),
    "text": (("def main():",), TypeError, "integer tensor .*got str; tokenizer"),
    "all padding": ((IDS, MASK * 0), ValueError, "row 0 .* all padding; .* at least one token"),
    "one row all padding": (
        (IDS, MASK * torch.tensor([[1], [0]])),
        ValueError,
        "row 1 of the batch is all padding",
    ),
    "hole": ((IDS, WITH_HOLE), ValueError, "row 1 has holes; .* unbroken run"),
    "mask shape": ((IDS, MASK[:, :4]), ValueError, r"input_ids, \[2, 5\], got \[2, 4\]"),
    "mask 4-D": ((IDS, MASK[:, None, None]), ValueError, r"\[2, 5\], got \[2, 1, 1, 5\]"),
    "additive mask": (
        (IDS, (1 - MASK) * torch.finfo(torch.float32).min),
        ValueError,
        r"1 for real tokens and 0 for padding, got -3\.4.*; an additive mask",
    ),
    "mask of counts": ((IDS, MASK * 2), ValueError, "0 for padding, got 2"),
    "mask list": ((IDS, MASK.tolist()), ValueError, r"\[2, 5\], got list"),
    "negative id": ((cell(1, 2, -1),), ValueError, r"input_ids\[1, 2\] is -1, .*vocabulary of 61"),
    "large id": ((cell(0, 4, 61),), ValueError, r"\[0, 4\] is 61, .* 61; .*target's tokenizer\?"),
    "too long": ((TOO_LONG,), ValueError, "129 tokens .* has 128 positions; shorten the prompt"),
}


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("method", ["generate", "stream", "start"])
def test_a_bad_prompt_is_refused(name, method):
    args, error, message = PROMPTS[name]
    with pytest.raises(error, match=message):
        getattr(GENERATOR, method)(*args, max_new_tokens=4)


SAMPLED = {"do_sample": True}
OPTIONS = {
    "unknown, close": ({"max_new_token": 4}, TypeError, "did you mean 'max_new_tokens'"),
    "unknown, far": ({"frobnicate": 4}, TypeError, "'frobnicate': known are .*custom_generate"),
    "too many": ({"max_new_tokens": 124}, ValueError, "129.* 128 positions; .* <= 123"),
    "none": ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be an integer >= 1, got 0"),
    "negative temperature": (
        SAMPLED | {"temperature": -0.5},
        ValueError,
        ">= 0, got -0.5 in row 0",
    ),
    "NaN temperature": (SAMPLED | {"temperature": math.nan}, ValueError, ">= 0, got nan in row 0"),
    "infinite temperature": (SAMPLED | {"temperature": math.inf}, ValueError, "got inf in row 0"),
    "text temperature": (SAMPLED | {"temperature": "hot"}, ValueError, "got 'hot' in row 0"),
    "temperatures": (SAMPLED | {"temperature": [1.0, -1.0]}, ValueError, "got -1.0 in row 1"),
    "3 temperatures": (
        SAMPLED | {"temperature": [1.0, 1.0, 1.0]},
        ValueError,
        "temperature has 3 values for a batch of 2 rows; give one per row, or a single value",
    ),
    "3 seeds": (SAMPLED | {"seed": [1, 2, 3]}, ValueError, "seed has 3 values for a batch of 2"),
    "temperature, greedy": ({"temperature": 0.7}, ValueError, "0.7 has no effect .*do_sample=True"),
    "top_k, greedy": ({"top_k": 5}, ValueError, "top_k=5 has no effect .*do_sample=True"),
    "top_k": (SAMPLED | {"top_k": -1}, ValueError, "top_k must be an integer >= 0 .*got -1"),
    "top_p": (SAMPLED | {"top_p": 1.5}, ValueError, r"top_p must be .*0\.\.1, got 1.5"),
    "min_p": (SAMPLED | {"min_p": -0.1}, ValueError, r"min_p must be .*0\.\.1, got -0.1"),
    "temperatures beside typical_p": (
        {
            "generation_config": GenerationConfig(do_sample=True, typical_p=0.5, eta_cutoff=0.1),
            "temperature": [0.7, 0.8],
        },
        ValueError,
        "temperature cannot be set per row beside typical_p, eta_cutoff, .* one value for all rows",
    ),
    "large seed": (SAMPLED | {"seed": 2**64}, ValueError, r"expected an integer in 0\.\.2\*\*64"),
    "negative seed": (SAMPLED | {"seed": [0, -1]}, ValueError, r"seed of row 1 is -1; expected"),
    "float seed": (SAMPLED | {"seed": 1.0}, TypeError, "seed must be an integer.*got 1.0"),
    "bool seed": (SAMPLED | {"seed": True}, TypeError, "seed must be an integer.*got True"),
    "beams": ({"generation_config": GenerationConfig(num_beams=3)}, ValueError, "num_beams=3 .*HF"),
    "several, greedy": (
        {"num_return_sequences": 2},
        ValueError,
        "do not support `num_return_sequences` different than 1",
    ),
    "several, text": (SAMPLED | {"num_return_sequences": "2"}, TypeError, "an integer.*, got '2'"),
    "seeds, several": (
        SAMPLED | {"num_return_sequences": 2, "seed": [1, 2, 3]},
        ValueError,
        "seed has 3 values for a batch of 4 rows",
    ),
    "attentions": (
        {
            "generation_config": GenerationConfig(
                output_attentions=True, return_dict_in_generate=True
            )
        },
        ValueError,
        "output_attentions=True is not supported",
    ),
    "stop strings without tokenizer": (
        {"stop_strings": ["x"]},
        ValueError,
        r"need the target's tokenizer: pass tokenizer=tokenizer, or .*StopStringCriteria\(",
    ),
    "tokenizer": ({"tokenizer": "gpt2"}, TypeError, "must be the target's, got str"),
    "no stop string": ({"stop_strings": ["x", ""]}, ValueError, "not empty, got .'x', ''"),
    "stop numbers": ({"stop_strings": [7]}, TypeError, r"list of strings, got \[7\]"),
    "scores": ({"output_scores": 3}, TypeError, "output_scores must be True or False, got 3"),
    "minimum": (
        {"min_new_tokens": 2.5},
        TypeError,
        r"min_new_tokens must be an integer.*, got 2\.5",
    ),
    "minimum, close": ({"min_new_token": 4}, TypeError, "did you mean 'min_new_tokens'"),
    "token types": ({"token_type_ids": IDS}, TypeError, "no such input; leave it out"),
}


TOKENIZER = zoo.load_tokenizer()
OPTIONS |= {
    "end beyond": ({"eos_token_id": VOCAB}, ValueError, r"eos_token_id .* 0\.\.60, got 61; .*\[\]"),
    "end below": ({"eos_token_id": [1, -5]}, ValueError, r"eos_token_id .* 0\.\.60, got -5"),
    "end bool": ({"eos_token_id": True}, TypeError, "eos_token_id must be an integer.*, got True"),
    "end float": ({"eos_token_id": 1.5}, TypeError, "eos_token_id must be an integer.*, got 1.5"),
    "end text": (
        {"eos_token_id": "</s>"},
        TypeError,
        "eos_token_id must be an integer.*, got '</s",
    ),
    "end nested": ({"eos_token_id": [[1]]}, TypeError, "eos_token_id must be an integer"),
    "pad beyond": ({"pad_token_id": 10**12}, ValueError, r"pad_token_id .* in 0\.\.60, got"),
    "pad below": ({"pad_token_id": -1}, ValueError, r"pad_token_id .* in 0\.\.60, got -1"),
    "pad list": ({"pad_token_id": [0]}, TypeError, r"pad_token_id must be an integer.*, got \[0\]"),
    "trace": ({"trace": "yes"}, TypeError, "trace must be True or False, got 'yes'"),
    "check": ({"check": None}, TypeError, "check must be True or False, got None"),
    "minimum below": ({"min_new_tokens": -1}, ValueError, "min_new_tokens .* >= 0, got -1"),
    "minimum above": ({"min_new_tokens": 5}, ValueError, "min_new_tokens=5 is more than max_new_t"),
    "no sequences": ({"num_return_sequences": 0}, ValueError, "num_return_sequences .* >= 1"),
    "too many sequences": (
        SAMPLED | {"num_return_sequences": 10**8},
        ValueError,
        "keys and values of 200000000 rows .* generate at most",
    ),
    "huge top_k": (SAMPLED | {"top_k": 2**63}, ValueError, "top_k must be an integer >= 0"),
    "bytes": (SAMPLED | {"temperature": b"11"}, ValueError, "temperature must be a number .*b'11'"),
    "configuration dict": (
        {"generation_config": {"top_k": 3}},
        TypeError,
        r"got a dictionary; pass GenerationConfig\(\*\*config\)",
    ),
    "configuration class": (
        {"generation_config": GenerationConfig},
        TypeError,
        "must be a GenerationConfig, got the class GenerationConfig",
    ),
    "no list of processors": (
        {"logits_processor": lambda ids, scores: scores},
        TypeError,
        r"logits_processor must be a list, got a function; pass LogitsProcessorList",
    ),
    "no processors": ({"logits_processor": [5]}, TypeError, "must hold functions of .*, got 5"),
    "classes": (
        {"stopping_criteria": [transformers.MaxTimeCriteria]},
        TypeError,
        "must hold functions .*got the class MaxTimeCriteria",
    ),
    "no text": ({"stop_strings": ""}, ValueError, "strings that are not empty, got"),
    "no texts": ({"stop_strings": []}, ValueError, "strings that are not empty, got"),
    "half a character": (
        {"stop_strings": "\ud800", "tokenizer": TOKENIZER},
        ValueError,
        "must be valid Unicode",
    ),
    "streamer class": (
        {"streamer": transformers.TextStreamer},
        TypeError,
        r"got the class; pass TextStreamer\(tokenizer\)",
    ),
}


def test_an_empty_list_of_ends_lets_no_token_end_a_text():
    first = int(MODEL.generate(IDS[:1], max_new_tokens=1, do_sample=False)[0, -1])
    model = build("llama")
    model.generation_config.eos_token_id = first
    generator = SpeculativeGenerator(model, None)
    assert generator.generate(IDS[:1], max_new_tokens=6).finish_reasons == ["eos"]
    result = generator.generate(IDS[:1], max_new_tokens=6, eos_token_id=[])
    assert result.lengths == [6]
    assert result.finish_reasons == ["length"]
    assert model.generation_config.eos_token_id == first
    config = GenerationConfig(max_new_tokens=6, eos_token_id=first)
    result = generator.generate(IDS[:1], generation_config=config, eos_token_id=[])
    assert result.lengths == [6]
    assert config.eos_token_id == first


def test_tensors_without_data_are_refused():
    with pytest.raises(TypeError, match="input_ids must be a plain tensor with data, got layout"):
        GENERATOR.generate(IDS.to_sparse(), max_new_tokens=4)
    with pytest.raises(TypeError, match="attention_mask must be a plain tensor with data"):
        GENERATOR.generate(IDS, MASK.to("meta"), max_new_tokens=4)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_bad_option_is_refused(name):
    options, error, message = OPTIONS[name]
    with pytest.raises(error, match=message):
        GENERATOR.generate(IDS, MASK, **{"max_new_tokens": 4} | options)


def test_the_longest_generation_that_fits_the_positions_is_not_refused():
    for name in ("llama", "gpt2", "opt"):
        model = build(name)
        ids, mask = ragged_prompts(VOCAB, 100, 104)
        expected = model.generate(
            ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        generator = SpeculativeGenerator(model, ModelDrafter(perturbed(model), num_draft_tokens=7))
        assert generator.generate(ids, mask, max_new_tokens=24).sequences.equal(expected)


def test_the_hook_refuses_what_it_cannot_honour():
    hook = {"max_new_tokens": 4, "custom_generate": GENERATOR}
    with pytest.raises(ValueError, match=r"another model .*generator.target.model.generate"):
        build("llama", seed=1).generate(IDS, **hook)
    cache = transformers.DynamicCache()
    MODEL(IDS[:, :3], past_key_values=cache)
    with pytest.raises(ValueError, match=r"past_key_values holds tokens already; .*whole prompt"):
        MODEL.generate(IDS, past_key_values=cache, **hook)
    with pytest.raises(ValueError, match="does not know: inputs_embeds"):
        MODEL.generate(inputs_embeds=MODEL.get_input_embeddings()(IDS), **hook)
    with pytest.raises(ValueError, match="num_beams=2 is not supported"):
        MODEL.generate(IDS, num_beams=2, **hook)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: ModelDrafter(MODEL, -1),
            ValueError,
            "must be an integer >= 0, got -1; 0 decodes plainly",
        ),
        (lambda: ModelDrafter(MODEL, 1.5), TypeError, "must be an integer.*, got 1.5"),
        (
            lambda: PromptLookupDrafter(-1),
            ValueError,
            "must be an integer >= 0, got -1; 0 decodes plainly",
        ),
        (lambda: PromptLookupDrafter(4, max_ngram=1, min_ngram=2), ValueError, "min_ngram=2, max"),
        (
            lambda: SpeculativeGenerator(MODEL, MODEL),
            TypeError,
            r"got a Llama.*ModelDrafter\(model\)",
        ),
        (lambda: SpeculativeGenerator(MODEL, None, "blok"), ValueError, "no sampler 'blok'; exp"),
        (lambda: SpeculativeGenerator(MODEL, None, "ensemble"), ValueError, r"EnsembleSampler\(0"),
        (lambda: SpeculativeGenerator(MODEL, "eagle"), ValueError, "no drafter 'eagle'; .*from_pr"),
        (
            lambda: SpeculativeGenerator(MODEL, PromptLookupDrafter),
            TypeError,
            r"got the class; pass PromptLookupDrafter\(\)",
        ),
        (
            lambda: SpeculativeGenerator(MODEL, None, RejectionSampler),
            TypeError,
            r"got the class; pass RejectionSampler\(\)",
        ),
        (lambda: SpeculativeGenerator(MODEL, None, None), TypeError, "sampler .*got None"),
        (
            lambda: SpeculativeGenerator(MODEL, None, prefill_chunk_size=0),
            ValueError,
            "prefill_chunk_size must be an integer >= 1, got 0",
        ),
        (lambda: SpeculativeGenerator(torch.nn.Linear(2, 2), None), TypeError, "got Linear"),
        (lambda: SpeculativeGenerator("gpt2", None), TypeError, "PreTrainedModel, got str"),
        (lambda: ModelDrafter(torch.nn.Linear(2, 2)), TypeError, "PreTrainedModel, got Linear"),
        (
            lambda: SpeculativeGenerator(MODEL, ModelDrafter(build("llama")).to("meta")),
            ValueError,
            r"draft model is on meta and the target on cpu; .*drafter.to\('cpu'\)",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graphs": 1}, "graphs must be True, False or 'auto', got 1"),
        ({"kept_bytes": 1.5}, "kept_bytes must be an integer.*, got 1.5"),
        ({"kept_bytes": "a"}, "kept_bytes must be an integer.*, got 'a'"),
        ({"steps_ahead": True}, "steps_ahead must be an integer.*, got True"),
    ],
)
def test_settings_of_a_generator_are_checked(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        SpeculativeGenerator(MODEL, None, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Target(MODEL, feature_layers=5), "feature_layers must be .*got 5; boundaries"),
        (lambda: Target(MODEL, feature_layers=None), "feature_layers must be .*got None"),
        (lambda: Target(MODEL, fuse="x"), "fuse must be True or False"),
        (lambda: Target(MODEL).init_cache(0, 5), "batch_size must be an integer >= 1, got 0"),
        (lambda: Target(MODEL).init_cache(1, "a"), "num_slots must be an integer.*, got 'a'"),
        (lambda: Target("gpt2"), r"AutoModelForCausalLM.from_pretrained\('gpt2'\)"),
        (lambda: GENERATOR.step("x"), "generation must be a Generation, got 'x'; generator.start"),
        (lambda: Warp(2, device="tpu9"), "device must be a torch device"),
        (lambda: Warp("a"), "batch_size must be an integer.*, got 'a'"),
        (lambda: Warp(2).at_temperature(-1), "temperature must be a number > 0, got -1"),
        (lambda: Noise(None), "seeds must be a Sequence, got None; one integer per row"),
        (lambda: Noise(["a"]), "seed of row 0 must be an integer.*, got 'a'"),
        (lambda: Noise([1]).at(3, 3), "start must be a tensor, got 3"),
        (lambda: Warp(2)([[1.0]]), r"logits must be a tensor of floats, got \[\[1.0\]\]"),
        (lambda: Warp(2)(torch.zeros(2, 5).long()), "logits must be a tensor of floats, got a in"),
        (lambda: Warp(2)(torch.zeros(3, 5)), r"logits must be \[2, V\] or .*, got \[3, 5\]"),
        (lambda: Warp(2)(torch.zeros(5)), r"logits must be \[2, V\] or .*, got \[5\]"),
        (lambda: Warp(2).draw(torch.zeros(2, 5), None), "uniforms must be a tensor, got None"),
        (lambda: Warp(2).load(None), "other must be a Warp, got None"),
        (lambda: Noise([1]).at(torch.tensor([1]), 2).uniform(99), "99 is not a valid Stream"),
        (lambda: RejectionSampler()(None, None, Warp(1), None), "draft must be a Draft, got None"),
        (lambda: Noise([1]).at(torch.tensor([1]), 0), "width must be an integer >= 1, got 0"),
    ],
)
def test_what_parts_are_given_is_checked(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


UNTRIED = {
    "drafter": lambda model: SpeculativeGenerator(model, 3),
    "drafter's name": lambda model: SpeculativeGenerator(model, "lockup"),
    "sampler": lambda model: SpeculativeGenerator(model, None, 3),
    "sampler's name": lambda model: SpeculativeGenerator(model, None, "lockup"),
    "chunk": lambda model: SpeculativeGenerator(model, None, prefill_chunk_size=0.5),
    "steps": lambda model: SpeculativeGenerator(model, None, steps_ahead=-1),
}


@pytest.mark.parametrize("case", UNTRIED)
def test_what_can_be_checked_without_the_target_is_checked_before_it_is_tried(case, monkeypatch):
    def forward(*args, **kwargs):
        raise AssertionError("the target ran a trial forward")

    model = build("llama")
    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises((TypeError, ValueError), match=r"drafter|sampler|must be an integer"):
        UNTRIED[case](model)
    with pytest.raises(ValueError, match="ran a trial forward"):
        SpeculativeGenerator(model, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EnsembleSampler("0.9"), "target_weight must be a number.*, got '0.9'"),
        (lambda: EnsembleSampler(True), "target_weight must be a number.*, got True"),
        (lambda: TypicalSampler(epsilon=None), "epsilon must be a number.*, got None"),
        (lambda: TypicalSampler(delta=[0.1]), r"delta must be a number.*, got \[0.1\]"),
        (lambda: EagleDrafter(MODEL, MODEL), r"expected a head first .*from_pretrained\(path_or"),
        (lambda: EagleDrafter("head", MODEL), "expected a head first .*got str"),
        (lambda: EagleDrafter.from_pretrained("head", "target"), "PreTrainedModel, got str"),
    ],
)
def test_constructors_of_parts_check_types(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_a_parameter_out_of_range_is_refused():
    for make in (lambda: TypicalSampler(delta=math.inf), lambda: TypicalSampler(delta=math.nan)):
        with pytest.raises(ValueError, match="delta must be a number >= 0"):
            make()
    with pytest.raises(ValueError, match=r"must be a number in 0\.\.1, got nan"):
        EnsembleSampler(math.nan)


def test_names_of_the_command_line_work_in_python():
    generator = SpeculativeGenerator(MODEL, "lookup", "rejection")
    assert isinstance(generator.drafter, PromptLookupDrafter)
    assert isinstance(generator.sampler, RejectionSampler)
    for name in ("auto", "block", "coupling", "typical"):
        generator = SpeculativeGenerator(MODEL, "none", name)
        assert type(generator.sampler).__name__.lower().startswith(name.replace("auto", "block"))
    assert isinstance(generator.drafter, NoDrafter)


def resized(vocab_size: int):
    model = build("llama")
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] *= 1e4  # what the padding says must not matter
    return model


def test_a_draft_model_of_another_vocabulary_is_refused_by_both_sizes():
    with pytest.raises(
        ValueError, match=f"vocabulary of 2000 and the target one of {VOCAB}; .*tok"
    ):
        SpeculativeGenerator(MODEL, ModelDrafter(resized(2000)))


def test_a_difference_of_vocabularies_that_cannot_be_padding_is_refused():
    """Both are small: 8 ids and 61 differ by less than the padding of large tables."""
    small = build("llama")
    small.resize_token_embeddings(8, mean_resizing=False)
    with pytest.raises(ValueError, match=r"of 8 and the target one of 61; .*up to 7 is taken for"):
        SpeculativeGenerator(MODEL, ModelDrafter(small))


def test_a_draft_model_of_another_tokenizer_is_refused():
    tokenizer, other = zoo.load_tokenizer(), zoo.load_tokenizer()
    other.add_tokens(["<extra>"])
    check_same_tokenizer(tokenizer, other)  # more tokens are no other tokens
    check_same_tokenizer(other, tokenizer)
    vocab = {token: (i + 1) % len(tokenizer) for token, i in tokenizer.get_vocab().items()}
    other.get_vocab = lambda: vocab
    with pytest.raises(ValueError, match=r"not the target's: 2048 of 2048 ids .* id 0 is .* share"):
        check_same_tokenizer(tokenizer, other)


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": [8, 9]}])
def test_a_draft_model_with_a_padded_vocabulary_drafts_as_if_it_had_none(options):
    generator = SpeculativeGenerator(MODEL, ModelDrafter(resized(VOCAB + 7)))
    result = generator.generate(IDS, MASK, max_new_tokens=20, **options)
    plain = SpeculativeGenerator(MODEL, ModelDrafter(MODEL))
    assert result.sequences.equal(plain.generate(IDS, MASK, max_new_tokens=20, **options).sequences)
    assert result.stats.acceptance_rate == 1


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": [8, 9]}])
def test_a_target_with_a_padded_vocabulary_takes_drafts_from_a_smaller_one(options):
    drafter = ModelDrafter(resized(VOCAB - 3))
    ids = cell(1, 3, VOCAB - 1)  # which the draft model cannot read
    result = SpeculativeGenerator(MODEL, drafter).generate(
        ids, MASK, max_new_tokens=20, trace=True, **options
    )
    drafted = [token for row in result.trace for step in row for token in step.draft_tokens]
    assert max(drafted) < VOCAB - 3
    assert 0 < result.stats.acceptance_rate < 1
    if not options:
        expected = MODEL.generate(ids, attention_mask=MASK, max_new_tokens=20, do_sample=False)
        assert result.sequences.equal(expected)
        for step in result.trace[0]:  # nothing but a token that it cannot say is ever rejected
            assert step.num_accepted == 4 or step.new_tokens[-1] >= VOCAB - 3
            if max(step.new_tokens) >= VOCAB - 3:
                break


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_draft_model_with_fewer_positions_drafts_as_far_as_it_can(name):
    target, draft = build(name), build(name)
    draft.config.max_position_embeddings = 16
    ids, mask = ragged_prompts(VOCAB, 3, 9, 20)
    expected = target.generate(
        ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0
    )
    result = SpeculativeGenerator(target, ModelDrafter(draft)).generate(
        ids, mask, max_new_tokens=24, trace=True
    )
    assert result.sequences.equal(expected)
    for length, steps in zip((3, 9, 20), result.trace, strict=True):
        for step in steps:  # a draft at position p needs the token before it to be readable
            assert len(step.draft_tokens) == min(4, max(0, 16 + 1 - length))
            assert step.num_accepted == len(step.draft_tokens)
            length += len(step.new_tokens)


def test_a_fraction_of_a_token_is_refused():
    with pytest.raises(TypeError, match=r"max_new_tokens must be an integer.*, got 2\.5"):
        GENERATOR.generate(IDS, max_new_tokens=2.5)


def test_a_target_put_in_training_mode_later_is_refused():
    MODEL.train()
    try:
        with pytest.raises(ValueError, match="training mode"):
            GENERATOR.generate(IDS, max_new_tokens=2)
    finally:
        MODEL.eval()


def test_a_target_in_another_data_type_or_under_autocast_is_refused():
    model = build("llama")
    generator = SpeculativeGenerator(model, PromptLookupDrafter(2))
    expected = generator.generate(IDS, MASK, max_new_tokens=4).sequences
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match=r"does not run under torch.autocast"),
    ):
        generator.generate(IDS, MASK, max_new_tokens=4)
    model.half()
    with pytest.raises(ValueError, match=r"was torch.float32 when .* is torch.float16 now; build"):
        generator.generate(IDS, MASK, max_new_tokens=4)
    model.float()
    again = generator.generate(IDS, MASK, max_new_tokens=4).sequences
    assert again.shape == expected.shape


@pytest.mark.parametrize(
    "change", [lambda m: m.double(), lambda m: m.train()], ids=["cast", "train"]
)
def test_a_draft_model_that_was_changed_after_it_was_wrapped_is_refused(change):
    draft = perturbed(MODEL)
    generator = SpeculativeGenerator(MODEL, ModelDrafter(draft))
    generator.generate(IDS, MASK, max_new_tokens=3)
    change(draft)
    with pytest.raises(ValueError, match=r"when specdec wrapped it|is in training mode"):
        generator.generate(IDS, MASK, max_new_tokens=3)
