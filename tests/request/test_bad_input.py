"""Bad input is refused before anything is computed, with the name of what is wrong; the model is
left as it was found. What looks bad but is not (padded vocabularies, a draft model with fewer
positions, logits that nobody reads) must work.
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
from specdec.hf import cache_argument

MODEL = build("llama")
GENERATOR = SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL)))
IDS, MASK = ragged_prompts(VOCAB, 2, 5)
WITH_HOLE = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 1]])
EITHER = ValueError, TypeError


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
    "empty": ((IDS[:, :0],), ValueError, "empty"),
    "no rows": ((IDS[:0],), ValueError, "empty"),
    "1-D": ((IDS[0],), ValueError, "input_ids"),
    "float": ((IDS.float(),), TypeError, "input_ids"),
    "list": ((IDS.tolist(),), TypeError, "input_ids"),
    "one row": ((IDS, MASK * torch.tensor([[1], [0]])), ValueError, "row 1 .* all padding"),
    "hole": ((IDS, WITH_HOLE), ValueError, "row 1 has holes"),
    "mask shape": ((IDS, MASK[:, :4]), ValueError, "attention_mask"),
    "additive mask": ((IDS, (1 - MASK) * -1e30), ValueError, "additive mask"),
    "mask of counts": ((IDS, MASK * 2), ValueError, "attention_mask"),
    "negative id": ((cell(1, 2, -1),), ValueError, r"input_ids\[1, 2\] is -1"),
    "large id": ((cell(0, 4, 61),), ValueError, r"input_ids\[0, 4\] is 61"),
    "too long": ((torch.ones(1, 129).long(),), ValueError, "129 tokens .* has 128 positions"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_bad_prompt_is_refused(name):
    args, error, message = PROMPTS[name]
    with pytest.raises(error, match=message):
        GENERATOR.generate(*args, max_new_tokens=4)


@pytest.mark.parametrize("method", ["stream", "start"])
def test_every_door_checks_when_it_is_called(method):
    with pytest.raises(ValueError, match="row 1 has holes"):
        getattr(GENERATOR, method)(IDS, WITH_HOLE, max_new_tokens=4)
    with pytest.raises(ValueError, match="temperature"):
        getattr(GENERATOR, method)(IDS, MASK, do_sample=True, temperature=-1.0)


BEAMS, ATTENTIONS = GenerationConfig(num_beams=3), GenerationConfig(output_attentions=True)
ETA = GenerationConfig(do_sample=True, eta_cutoff=0.1)
OPTIONS = [
    (TypeError, "did you mean 'max_new_tokens'", {"max_new_token": 4}),
    (TypeError, "'frobnicate': known are .*custom_generate", {"frobnicate": 4}),
    (TypeError, "leave it out", {"token_type_ids": IDS}),
    (ValueError, "128 positions; .* <= 123", {"max_new_tokens": 124}),
    (ValueError, "max_new_tokens", {"max_new_tokens": 0}),
    (ValueError, "min_new_tokens", {"min_new_tokens": -1}),
    (ValueError, "min_new_tokens=5 is more", {"min_new_tokens": 5}),
    (ValueError, "temperature=0.7 samples", {"temperature": 0.7, "do_sample": False}),
    (ValueError, "top_k=5 has no effect", {"top_k": 5}),
    (ValueError, "num_return_sequences", {"num_return_sequences": 2}),
    (ValueError, "beams=3 is not supported", {"generation_config": BEAMS}),
    (ValueError, "output_attentions", {"generation_config": ATTENTIONS}),
    (ValueError, "beside eta_cutoff", {"generation_config": ETA, "temperature": [0.7, 0.8]}),
    (TypeError, r"GenerationConfig\(\*\*", {"generation_config": {"top_k": 3}}),
    (ValueError, "stop_strings need the target's tokenizer", {"stop_strings": ["x"]}),
    (ValueError, "stop_strings", {"stop_strings": ["x", ""]}),
    (TypeError, "tokenizer", {"tokenizer": "gpt2"}),
    (ValueError, "output_scores", {"output_scores": 3}),
    (ValueError, r"eos_token_id .*\[\] lets no token end", {"eos_token_id": VOCAB}),
    (ValueError, "eos_token_id", {"eos_token_id": [1, -5]}),
    (TypeError, "eos_token_id", {"eos_token_id": True}),
    (ValueError, "pad_token_id", {"pad_token_id": -1}),
    (EITHER, "trace", {"trace": "yes"}),
    (EITHER, "check", {"check": None}),
    (TypeError, "function", {"logits_processor": lambda ids, scores: scores}),
    (ValueError, "logits processor int may keep state", {"logits_processor": [5]}),
    (TypeError, "MaxTimeCriteria", {"stopping_criteria": [transformers.MaxTimeCriteria]}),
    (TypeError, r"TextStreamer\(tokenizer\)", {"streamer": transformers.TextStreamer}),
]
SAMPLED = [
    *((ValueError, "temperature", {"temperature": v}) for v in (-0.5, math.nan, math.inf, "hot")),
    (ValueError, "temperature .*row 1", {"temperature": [1.0, -1.0]}),
    (ValueError, "3 values for a batch of 2 rows", {"temperature": [1.0, 1.0, 1.0]}),
    *((ValueError, "top_k", {"top_k": value}) for value in (-1, 2**63)),
    (ValueError, "top_p", {"top_p": 1.5}),
    (ValueError, "seed has 3 values for a batch of 2", {"seed": [1, 2, 3]}),
    *((ValueError, "seed", {"seed": value}) for value in (2**64, [0, -1])),
    *((TypeError, "seed", {"seed": value}) for value in (1.0, True, "ab")),
    (TypeError, "num_return_sequences", {"num_return_sequences": "2"}),
    (ValueError, "3 values .* 4 rows", {"num_return_sequences": 2, "seed": [1, 2, 3]}),
    *(
        (ValueError, f"keys and values of {2 * n} rows", {"num_return_sequences": n})
        for n in (10**8, 10**15)
    ),
]


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [*OPTIONS, *((e, m, {"do_sample": True} | o) for e, m, o in SAMPLED)],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_option_is_refused(error, message, options):
    with pytest.raises(error, match=message):
        GENERATOR.generate(IDS, MASK, **{"max_new_tokens": 4} | options)


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


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_the_longest_generation_that_fits_the_positions_is_not_refused(name):
    model = build(name)
    ids, mask = ragged_prompts(VOCAB, 100, 104)
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=mask, **options)
    generator = SpeculativeGenerator(model, ModelDrafter(perturbed(model), num_draft_tokens=7))
    assert generator.generate(ids, mask, max_new_tokens=24).sequences.equal(expected)


def test_the_hook_refuses_what_it_cannot_honour():
    hook = {"max_new_tokens": 4, "custom_generate": GENERATOR}
    with pytest.raises(ValueError, match="another model"):
        build("llama", seed=1).generate(IDS, **hook)
    name, cache = cache_argument(MODEL), transformers.DynamicCache()
    MODEL(IDS[:, :3], **{name: cache})
    with pytest.raises(ValueError, match=f"{name} holds tokens"):
        MODEL.generate(IDS, **{name: cache}, **hook)
    with pytest.raises(ValueError, match="inputs_embeds"):
        MODEL.generate(inputs_embeds=MODEL.get_input_embeddings()(IDS), **hook)
    with pytest.raises(ValueError, match="num_beams"):
        MODEL.generate(IDS, num_beams=2, **hook)


PARTS = {
    "K of a model": ("num_draft_tokens", lambda: ModelDrafter(MODEL, -1)),
    "draft model": ("PreTrainedModel", lambda: ModelDrafter(torch.nn.Linear(2, 2))),
    "proposal": ("proposal", lambda: ModelDrafter(MODEL, proposal="greedy")),
    "no heat": ("draft_temperature", lambda: ModelDrafter(MODEL, draft_temperature=0.0)),
    "heat of argmax": (
        "proposal='argmax'",
        lambda: ModelDrafter(MODEL, proposal="argmax", draft_temperature=0.5),
    ),
    "head": ("from_pretrained", lambda: EagleDrafter(MODEL, MODEL)),
    "target weight": ("target_weight", lambda: EnsembleSampler("0.9")),
    "epsilon": ("epsilon", lambda: TypicalSampler(epsilon=1.5)),
    "feature layers": ("feature_layers", lambda: Target(MODEL, feature_layers=5)),
    "target's name": ("from_pretrained", lambda: Target("gpt2")),
    "rows of a cache": ("batch_size", lambda: Target(MODEL).init_cache(0, 5)),
    "no model": ("PreTrainedModel", lambda: SpeculativeGenerator("gpt2", None)),
    "a module": ("Linear", lambda: SpeculativeGenerator(torch.nn.Linear(2, 2), None)),
    "drafter": (r"ModelDrafter\(model\)", lambda: SpeculativeGenerator(MODEL, MODEL)),
    "drafter's name": ("drafter 'eagle'", lambda: SpeculativeGenerator(MODEL, "eagle")),
    "drafter's class": (
        r"PromptLookupDrafter\(\)",
        lambda: SpeculativeGenerator(MODEL, PromptLookupDrafter),
    ),
    "elsewhere": (
        "draft model is on meta",
        lambda: SpeculativeGenerator(MODEL, ModelDrafter(build("llama")).to("meta")),
    ),
    "sampler's name": ("got 'blok'", lambda: SpeculativeGenerator(MODEL, None, "blok")),
    "ensemble": (r"EnsembleSampler\(0", lambda: SpeculativeGenerator(MODEL, None, "ensemble")),
    "sampler's class": (
        r"RejectionSampler\(\)",
        lambda: SpeculativeGenerator(MODEL, None, RejectionSampler),
    ),
    "no sampler": ("sampler", lambda: SpeculativeGenerator(MODEL, None, None)),
    "chunk": ("prefill_chunk", lambda: SpeculativeGenerator(MODEL, None, prefill_chunk_size=0)),
    "graphs": ("graphs", lambda: SpeculativeGenerator(MODEL, None, graphs=1)),
    "bytes": ("kept_bytes", lambda: SpeculativeGenerator(MODEL, None, kept_bytes=1.5)),
    "steps": ("steps_ahead", lambda: SpeculativeGenerator(MODEL, None, steps_ahead=True)),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_do_not_fit_are_refused_before_the_target_is_tried(name, monkeypatch):
    def forward(self, past_key_values, **kwargs):
        raise AssertionError("the target ran a trial forward")

    message, make = PARTS[name]
    if name not in ("elsewhere", "rows of a cache", "feature layers"):
        model = build("llama")  # trials of a model are made once
        monkeypatch.setitem(globals(), "MODEL", model)
        monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(EITHER, match=message):
        make()
    if name == "chunk":  # the control
        with pytest.raises(ValueError, match="ran a trial forward"):
            SpeculativeGenerator(model, None)


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
    with pytest.raises(
        ValueError, match=r"not the target's: 2048 of 2048 ids .* id 0 is .* needs vocab"
    ):
        check_same_tokenizer(tokenizer, other)


SEEDED = {"do_sample": True, "seed": [8, 9]}


@pytest.mark.parametrize("options", [{}, SEEDED], ids=["greedy", "sampled"])
def test_a_draft_model_with_a_padded_vocabulary_drafts_as_if_it_had_none(options):
    generator = SpeculativeGenerator(MODEL, ModelDrafter(resized(VOCAB + 7)))
    result = generator.generate(IDS, MASK, max_new_tokens=20, **options)
    plain = SpeculativeGenerator(MODEL, ModelDrafter(MODEL))
    assert result.sequences.equal(plain.generate(IDS, MASK, max_new_tokens=20, **options).sequences)
    assert result.stats.acceptance_rate == 1


@pytest.mark.parametrize("options", [{}, SEEDED], ids=["greedy", "sampled"])
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


def test_training_mode_is_refused_where_something_is_dropped_at_random():
    model = build("llama", attention_dropout=0.1)
    generator = SpeculativeGenerator(model, PromptLookupDrafter(2))
    model.train()
    with pytest.raises(ValueError, match=r"training mode.*self_attn\.attention_dropout=0\.1"):
        generator.generate(IDS, max_new_tokens=2)


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


def put_into_training(model):
    model.train()
    model.model.layers[0].self_attn.attention_dropout = 0.1


@pytest.mark.parametrize("change", [lambda m: m.double(), put_into_training], ids=["cast", "train"])
def test_a_draft_model_that_was_changed_after_it_was_wrapped_is_refused(change):
    draft = perturbed(MODEL)
    generator = SpeculativeGenerator(MODEL, ModelDrafter(draft))
    generator.generate(IDS, MASK, max_new_tokens=3)
    change(draft)
    with pytest.raises(ValueError, match=r"when specdec wrapped it|is in training mode"):
        generator.generate(IDS, MASK, max_new_tokens=3)
