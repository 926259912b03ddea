"""Bad input is refused before anything is computed, by a line that names what is wrong and what to
do; the model is left as it was found. One table for each door: `generate`, HF's hook, the parts.

What looks bad but is not (padded vocabularies, a draft model with fewer positions) must work.
"""

import math

import pytest
import torch
import transformers
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from fingerprint import fingerprint
from letters import letter_tokenizer
from transformers import DynamicCache, GenerationConfig

from specdec import (
    EagleDrafter,
    EnsembleSampler,
    ModelDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SelfDrafter,
    SpeculativeGenerator,
    Target,
    TypicalSampler,
    zoo,
)
from specdec.drafters.model import check_same_tokenizer
from specdec.hf.forward import cache_argument

MODEL = build("llama")
GENERATOR = SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL)))
IDS, MASK = ragged_prompts(VOCAB, 2, 5)
WITH_HOLE = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 1]])
EITHER = TypeError, ValueError


@pytest.fixture(autouse=True)
def _nothing_changes_the_model():
    before = fingerprint(MODEL)
    yield
    assert fingerprint(MODEL) == before


def prompt(ids, mask=None, **options):
    return {"input_ids": ids, "attention_mask": mask} | options


def cell(row: int, column: int, value: int) -> torch.Tensor:
    ids = IDS.clone()
    ids[row, column] = value
    return ids


def config(**options):
    return {"generation_config": GenerationConfig(**options)}


def sampled(name: str, *values, words: str | None = None) -> list:
    return [(words or name, {"do_sample": True, name: value}) for value in values]


CALLS = [
    ("empty", prompt(IDS[:, :0])),
    ("empty", prompt(IDS[:0])),
    ("input_ids", prompt(IDS.float())),
    (r"a tensor \[B, T\] of token ids, got \[\[.*torch.tensor\(\[\[5", prompt(IDS.tolist())),
    (r"got 'hello'; tokenizer\(text, return_tensors='pt'\)", prompt("hello")),
    (r"got \['a', 'b'\]; .*padding=True, padding_side='left'", prompt(["a", "b"])),
    ("got None; every call needs a prompt: tokenizer", prompt(None)),
    (r"of shape \[5\]; input_ids\[None\] is a batch of one prompt", prompt(IDS[0])),
    ("row 1 .* all padding", prompt(IDS, MASK * torch.tensor([[1], [0]]))),
    ("row 1 has holes", prompt(IDS, WITH_HOLE)),
    ("attention_mask", prompt(IDS, MASK[:, :4])),
    ("additive mask", prompt(IDS, (1 - MASK) * -1e30)),
    ("attention_mask", prompt(IDS, MASK * 2)),
    (r"input_ids\[1, 2\] is -1", prompt(cell(1, 2, -1))),
    (r"input_ids\[0, 4\] is 61", prompt(cell(0, 4, 61))),
    ("129 tokens .* has 128 positions", prompt(torch.ones(1, 129).long())),
    ("input_ids, attention_mask and an", prompt({"input_ids": IDS, "attention_mask": MASK}, MASK)),
    ("a tokenizer.s output .*got one with pixel_values", prompt({"pixel_values": 1})),
    (
        r"row 1 .* ends in the padding id 0, .* attention_mask",
        prompt(torch.tensor([[5, 9], [6, 0]]), pad_token_id=0),
    ),
    ("did you mean 'max_new_tokens'", {"max_new_token": 4}),
    ("'frobnicate': known are .*custom_generate", {"frobnicate": 4}),
    ("leave it out", {"token_type_ids": IDS}),
    *(
        (rf"pass generation_config=GenerationConfig\({name}={value}\)$", {name: value})
        for name, value in {
            "repetition_penalty": 1.2,
            "top_h": 0.5,
            "max_length": 9,
            "forced_eos_token_id": 3,
            "decoder_start_token_id": 3,
            "watermarking_config": {"bias": 2.0},
        }.items()
    ),
    (r"leaves out what is None; pass it to model.generate\(\.\.\., cus", {"typical_p": None}),
    ("'repetition_penalt'.*'repetition_penalty' of a generation_config", {"repetition_penalt": 2}),
    ("did you mean 'streamer'", {"streamers": None}),
    ("every result is a record; leave it out", {"return_dict_in_generate": True}),
    (
        r"PrefixConstrainedLogitsProcessor\(prefix_allowed_tokens_fn",
        {"prefix_allowed_tokens_fn": 1},
    ),
    (r"with ModelDrafter\(assistant_model\)", {"assistant_model": MODEL}),
    ("caches of its own; leave it out", {"cache_implementation": "static"}),
    ("caches of its own; pass the whole prompt", {"past_key_values": DynamicCache()}),
    ("pass the prompts as input_ids", {"inputs": IDS}),
    (r"SpeculativeGenerator\(prefill_chunk_size=\)", {"prefill_chunk_size": 4}),
    ("'guidance_scale': it reads a second text.*use HF generate", {"guidance_scale": 1.5}),
    ("do_sample=False is greedy", {"temperature": 0.7, "do_sample": None}),
    ("128 positions; .* <= 123", {"max_new_tokens": 124}),
    ("max_new_tokens", {"max_new_tokens": 0}),
    ("min_new_tokens", {"min_new_tokens": -1}),
    ("min_new_tokens=5 is more", {"min_new_tokens": 5}),
    ("temperature=0.7 samples", {"temperature": 0.7, "do_sample": False}),
    ("top_k=5 has no effect", {"top_k": 5}),
    ("num_return_sequences", {"num_return_sequences": 2}),
    ("'num_beams': specdec decodes greedily or", {"num_beams": 3}),
    ("beams=3 is not supported", config(num_beams=3)),
    *(
        (f"{name}.*no result holds them .* use HF generate", options)
        for name in ("output_attentions", "output_hidden_states")
        for options in ({name: True}, config(**{name: True}, return_dict_in_generate=True))
    ),
    *(
        (f"beside {name}", config(do_sample=True, **{name: value}) | {"temperature": [0.7, 0.8]})
        for name, value in {"eta_cutoff": 0.1, "renormalize_logits": True}.items()
    ),
    (r"GenerationConfig\(\*\*", {"generation_config": {"top_k": 3}}),
    ("stop_strings need the target's tokenizer", {"stop_strings": ["x"]}),
    ("stop_strings need the target's tokenizer", config(stop_strings=["x"])),
    ("stop_strings", {"stop_strings": ["x", ""], "tokenizer": letter_tokenizer()}),
    ("tokenizer", {"tokenizer": "gpt2"}),
    ("output_scores", {"output_scores": 3}),
    ("output_logprobs", {"output_logprobs": "all"}),
    (r"eos_token_id .*\[\] lets no token end", {"eos_token_id": VOCAB}),
    ("eos_token_id", {"eos_token_id": [1, -5]}),
    ("eos_token_id", {"eos_token_id": True}),
    ("pad_token_id", {"pad_token_id": -1}),
    ("trace", {"trace": "yes"}),
    ("check", {"check": None}),
    ("function", {"logits_processor": lambda ids, scores: scores}),
    (r"processor must be a list of functions, got 5", {"logits_processor": 5}),
    (r"processor must hold functions of \(ids, scores\), got 5", {"logits_processor": [5]}),
    (
        "criteria must be a list of functions, got a function",
        {"stopping_criteria": lambda ids, scores: True},
    ),
    ("criteria must hold functions .*got 'x'", {"stopping_criteria": ["x"]}),
    (
        "stop_strings must hold strings .*got 5",
        {"stop_strings": 5, "tokenizer": letter_tokenizer()},
    ),
    ("input_ids are on the meta device", prompt(IDS.to("meta"))),
    ("attention_mask is on the meta device", prompt(IDS, MASK.to("meta"))),
    ("MaxTimeCriteria", {"stopping_criteria": [transformers.MaxTimeCriteria]}),
    (r"TextStreamer\(tokenizer\)", {"streamer": transformers.TextStreamer}),
    (r"put\(tokens\) and end\(\), got", {"streamer": []}),
    *sampled("temperature", -0.5, math.nan, math.inf, "hot"),
    *sampled("temperature", [1.0, -1.0], words="temperature .*row 1"),
    *sampled("temperature", [1.0, 1.0, 1.0], words="3 values for a batch of 2 rows"),
    *sampled("top_k", -1, 2**63),
    *sampled("top_p", 1.5),
    *sampled("seed", [1, 2, 3], words="seed has 3 values for a batch of 2"),
    *sampled("seed", 2**64, [0, -1], 1.0, True, "ab"),
    *(("seed", {"seed": value}) for value in ("x", -1, 1.5, [1, 2, 3])),  # greedy ones, too
    *sampled("num_return_sequences", "2"),
    *sampled("num_return_sequences", 10**8, words="keys and values of 200000000 rows"),
    ("3 values .* 4 rows", {"do_sample": True, "num_return_sequences": 2, "seed": [1, 2, 3]}),
]


@pytest.mark.parametrize(("words", "options"), CALLS)
def test_a_bad_call_is_refused(words, options):
    with pytest.raises(EITHER, match=words):
        GENERATOR.generate(**prompt(IDS, MASK, max_new_tokens=4) | options)


@pytest.mark.parametrize("method", ["stream", "start"])
def test_every_door_checks_when_it_is_called(method):
    with pytest.raises(ValueError, match="row 1 has holes"):
        getattr(GENERATOR, method)(IDS, WITH_HOLE, max_new_tokens=4)
    with pytest.raises(ValueError, match="temperature"):
        getattr(GENERATOR, method)(IDS, MASK, do_sample=True, temperature=-1.0)


POSITIONS = (MASK.cumsum(dim=1) - 1).clamp(min=0)
HOOKED = [
    ("num_beams", {"num_beams": 2}),
    ("synced_gpus=True is not supported", {"synced_gpus": True}),
    ("assistant_model .*ModelDrafter", {"assistant_model": perturbed(MODEL)}),
    ("guidance_scale=1.5 is not supported.*use HF generate", {"guidance_scale": 1.5}),
    (r"StoppingCriteriaList\(\[StopStringCriteria\(", {"stop_strings": ["x"]}),
    *(
        (r"position_ids other than 0, 1, 2.* leave pos", {"position_ids": positions})
        for positions in (POSITIONS + 1, POSITIONS.flip(1))
    ),
    ("output_hidden_states.*no result holds them .* use HF", {"output_hidden_states": True}),
    *(
        (f"{name}.*(drafter|use HF generate)", {name: value})
        for name, value in {
            "force_words_ids": [[3]],
            "constraints": [object()],
            "use_mtp": True,
            "prompt_lookup_num_tokens": 3,
            "assistant_early_exit": 1,
            "num_assistant_tokens": 7,
            "num_assistant_tokens_schedule": "heuristic_transient",
            "assistant_confidence_threshold": 0.9,
            "assistant_ensemble_weight": 0.5,
        }.items()
    ),
]


@pytest.mark.parametrize(("words", "options"), HOOKED)
def test_the_hook_refuses_what_it_would_otherwise_drop(words, options):
    call = {"inputs": IDS, "attention_mask": MASK, "max_new_tokens": 4, "do_sample": False}
    with pytest.raises(ValueError, match=words):
        MODEL.generate(**call | options, custom_generate=GENERATOR)


def test_the_hook_refuses_another_model_and_a_cache_with_tokens():
    hook = {"max_new_tokens": 4, "custom_generate": GENERATOR}
    with pytest.raises(ValueError, match="another model"):
        build("llama", seed=1).generate(IDS, **hook)
    name, cache = cache_argument(MODEL), DynamicCache()
    MODEL(IDS[:, :3], **{name: cache})
    with pytest.raises(ValueError, match=f"{name} holds tokens"):
        MODEL.generate(IDS, **{name: cache}, **hook)


def generator_of(drafter=None, sampler="auto", **options):
    return lambda model: SpeculativeGenerator(model, drafter, sampler, **options)


BEFORE_TRIALS = [
    ("num_draft_tokens", lambda model: ModelDrafter(model, -1)),
    ("PreTrainedModel", lambda model: ModelDrafter(torch.nn.Linear(2, 2))),
    ("proposal", lambda model: ModelDrafter(model, proposal="greedy")),
    ("draft_temperature", lambda model: ModelDrafter(model, draft_temperature=0.0)),
    (
        "proposal='argmax'",
        lambda model: ModelDrafter(model, proposal="argmax", draft_temperature=0.5),
    ),
    ("from_pretrained", lambda model: EagleDrafter(model, model)),
    ("target_weight", lambda model: EnsembleSampler("0.9")),
    ("epsilon", lambda model: TypicalSampler(epsilon=1.5)),
    ("from_pretrained", lambda model: Target("gpt2")),
    ("PreTrainedModel", lambda model: SpeculativeGenerator("gpt2", None)),
    ("got None; pass what AutoModelFor", lambda model: Target(None)),
    ("got the class Llama.*; pass what AutoModelFor", lambda model: Target(type(model))),
    ("no vocabulary head; load the whole", lambda model: Target(model.model)),
    ("Linear", lambda model: SpeculativeGenerator(torch.nn.Linear(2, 2), None)),
    (r"ModelDrafter\(model\)", lambda model: SpeculativeGenerator(model, model)),
    ("drafter 'eagle'", generator_of("eagle")),
    (r"PromptLookupDrafter\(\)", generator_of(PromptLookupDrafter)),
    ("got 'blok'", generator_of(sampler="blok")),
    (r"RejectionSampler\(\)", generator_of(sampler=RejectionSampler)),
    ("sampler", generator_of(sampler=None)),
    ("prefill_chunk", generator_of(prefill_chunk_size=0)),
    ("graphs", generator_of(graphs=1)),
    ("kept_bytes", generator_of(kept_bytes=1.5)),
    ("steps_ahead", generator_of(steps_ahead=True)),
]
LATER = [
    ("feature_layers", lambda model: Target(model, feature_layers=5)),
    ("is 128, and the target has 128 positions", generator_of(PromptLookupDrafter(128))),
    ("layers must be an integer or a list", lambda model: SelfDrafter(model, layers=1.5)),
    ("no drafter a LlamaForCausalLM; expected", lambda model: zoo.load_drafter(model, "eagle3")),
    ("batch_size", lambda model: Target(model).init_cache(0, 5)),
    (
        "model is on meta",
        lambda model: generator_of(ModelDrafter(model).to("meta"))(build("llama")),
    ),
]


@pytest.mark.parametrize(("words", "make"), BEFORE_TRIALS)
def test_parts_that_do_not_fit_are_refused_before_the_target_is_tried(words, make, monkeypatch):
    def forward(self, past_key_values, **kwargs):
        raise AssertionError("the target ran a trial forward")

    model = build("llama")  # trials of a model are made once
    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(EITHER, match=words):
        make(model)
    with pytest.raises(ValueError, match="ran a trial forward"):  # the control
        SpeculativeGenerator(model, None)


@pytest.mark.parametrize(("words", "make"), LATER)
def test_parts_that_do_not_fit_a_target_are_refused(words, make):
    with pytest.raises(EITHER, match=words):
        make(build("llama"))


@pytest.mark.parametrize("size", [2000, 8])
def test_a_draft_model_of_another_vocabulary_is_refused_by_both_sizes(size):
    """8 ids and 61 differ by less than the padding of large tables, and are none."""
    draft = build("llama")
    draft.resize_token_embeddings(size, mean_resizing=False)
    with pytest.raises(ValueError, match=f"of {size} and the target one of {VOCAB}"):
        SpeculativeGenerator(MODEL, ModelDrafter(draft))


def test_a_draft_model_of_another_tokenizer_is_refused():
    tokenizer, other = zoo.load_tokenizer(), zoo.load_tokenizer()
    other.add_tokens(["<extra>"])
    check_same_tokenizer(tokenizer, other)  # more tokens are no other tokens
    check_same_tokenizer(other, tokenizer)
    vocab = {token: (i + 1) % len(tokenizer) for token, i in tokenizer.get_vocab().items()}
    other.get_vocab = lambda: vocab
    with pytest.raises(ValueError, match=r"2048 of 2048 ids .* id 0 is .* needs vocab"):
        check_same_tokenizer(tokenizer, other)


# What looks bad and is not.


def test_names_of_the_command_line_work_in_python():
    generator = SpeculativeGenerator(MODEL, "lookup", "rejection")
    assert isinstance(generator.drafter, PromptLookupDrafter)
    for name in ("auto", "block", "coupling", "typical", "rejection"):
        sampler = SpeculativeGenerator(MODEL, "none", name).sampler
        assert type(sampler).__name__.lower().startswith(name.replace("auto", "block"))


def test_an_empty_list_of_ends_lets_no_token_end_a_text():
    first = int(MODEL.generate(IDS[:1], max_new_tokens=1, do_sample=False)[0, -1])
    model = build("llama")
    model.generation_config.eos_token_id = first
    generator = SpeculativeGenerator(model, None)
    assert generator.generate(IDS[:1], max_new_tokens=6).finish_reasons == ["eos"]
    result = generator.generate(IDS[:1], max_new_tokens=6, eos_token_id=[])
    assert (result.lengths, result.finish_reasons) == ([6], ["length"])
    assert model.generation_config.eos_token_id == first
    own = GenerationConfig(max_new_tokens=6, eos_token_id=first)
    result = generator.generate(IDS[:1], generation_config=own, eos_token_id=[])
    assert (result.lengths, own.eos_token_id) == ([6], first)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_the_longest_generation_that_fits_the_positions_is_not_refused(name):
    model = build(name)
    ids, mask = ragged_prompts(VOCAB, 100, 104)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=mask, **options)
    generator = SpeculativeGenerator(model, ModelDrafter(perturbed(model), num_draft_tokens=7))
    assert generator.generate(ids, mask, max_new_tokens=24).sequences.equal(expected)


def resized(vocab_size: int):
    model = build("llama")
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] *= 1e4  # what the padding says must not matter
    return model


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": [8, 9]}], ids=len)
def test_padded_vocabularies_draft_and_are_drafted_for(options):
    options = options | {"max_new_tokens": 20, "trace": True}
    padded = SpeculativeGenerator(MODEL, ModelDrafter(resized(VOCAB + 7)))
    result = padded.generate(IDS, MASK, **options)
    plain = SpeculativeGenerator(MODEL, ModelDrafter(MODEL))
    assert result.sequences.equal(plain.generate(IDS, MASK, **options).sequences)
    assert result.stats.acceptance_rate == 1
    ids = cell(1, 3, VOCAB - 1)  # which the smaller draft model cannot read
    smaller = SpeculativeGenerator(MODEL, ModelDrafter(resized(VOCAB - 3)))
    result = smaller.generate(ids, MASK, **options)
    drafted = [token for row in result.trace for step in row for token in step.draft_tokens]
    assert max(drafted) < VOCAB - 3
    assert 0 < result.stats.acceptance_rate < 1
    if "seed" not in options:
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
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = target.generate(ids, attention_mask=mask, **options)
    generator = SpeculativeGenerator(target, ModelDrafter(draft))
    result = generator.generate(ids, mask, **options, trace=True)
    assert result.sequences.equal(expected)
    for length, steps in zip((3, 9, 20), result.trace, strict=True):
        for step in steps:  # a draft at position p needs the token before it to be readable
            assert len(step.draft_tokens) == min(4, max(0, 16 + 1 - length))
            assert step.num_accepted == len(step.draft_tokens)
            length += len(step.new_tokens)


def test_training_mode_without_dropout_is_that_of_evaluation():
    model, draft = build("llama"), build("llama", seed=1)
    generator = SpeculativeGenerator(model, ModelDrafter(draft, 2))
    expected = generator.generate(IDS, MASK, max_new_tokens=9)
    model.train(), draft.train()
    model.gradient_checkpointing_enable()  # without a cache, as HF has it in training
    again = generator.generate(IDS, MASK, max_new_tokens=9)
    assert torch.equal(again.sequences, expected.sequences)
    assert again.stats.acceptance_length == expected.stats.acceptance_length
    assert SpeculativeGenerator(model, None).target.model.training
