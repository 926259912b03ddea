"""Encoder-decoders: text equals that of HF's `generate`, alone and in ragged batches, with every
kind of drafter; the self-test finds faults of the cross attention; what is not supported says so.
"""

import copy
import functools
import pickle

import pytest
import torch
import transformers
from diagonal import PLACES, diagonal, first
from encoder_decoders import TYPES, build_whole, kept_whole, noisy, sources
from refusals import refused
from target_laws import check_found
from transformers import GenerationMixin

from specdec import (
    FirstMatch,
    ModelDrafter,
    PromptLookupDrafter,
    SelfDrafter,
    SourceLookupDrafter,
    SpeculativeGenerator,
    Target,
    certify,
    zoo,
)
from specdec.targets.edits import cross

NEW = 12
OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": []}
LENGTHS = 19, 8, 3
DRAFTERS = "lookup", "source lookup", "model", "tree", "none"


def hf_text(model, **given):
    options = {**OPTIONS, "eos_token_id": None}
    return GenerationMixin.generate(model, **given, **options)


@functools.cache
def target_of(name):
    return Target(kept_whole(name))


@functools.cache
def drafts_of(name):
    return noisy(kept_whole(name), name)


def drafter_of(kind, name):
    if kind == "model":
        return ModelDrafter(drafts_of(name))
    if kind == "tree":
        return ModelDrafter(drafts_of(name), tree="8x3")
    if kind == "source lookup":
        is_text = kept_whole(name).main_input_name == "input_ids"
        return SourceLookupDrafter() if is_text else "lookup"
    return None if kind == "none" else "lookup"


@pytest.mark.parametrize(("name", "kind"), diagonal(TYPES, DRAFTERS))
def test_greedy_text_is_that_of_hf_for_each_row_alone_and_in_a_ragged_batch(name, kind):
    model = kept_whole(name)
    batch, rows = sources(model, *LENGTHS)
    expected = torch.cat([hf_text(model, **row) for row in rows])
    generator = SpeculativeGenerator(target_of(name), drafter_of(kind, name))
    result = generator.generate(**batch, **OPTIONS)
    assert result.sequences.equal(expected)
    assert generator.generate(**rows[1], **OPTIONS).sequences.equal(expected[1:2])
    assert hf_text(model, **batch, custom_generate=generator).equal(expected)
    if kind in ("model", "tree"):
        assert result.stats.acceptance_length > 1


@pytest.mark.parametrize("name", first(TYPES, ("bart", "t5", "whisper")))
def test_logits_in_half_precision_are_as_near_those_in_float32_as_hf_s(name):
    """Random models enlarge a rounding, so that texts differ; the yardstick is HF's own."""
    model = build_whole(name, dtype=torch.bfloat16)
    batch, _ = sources(model, *LENGTHS)
    generator = SpeculativeGenerator(model, "lookup")
    own = {"generation_config": transformers.GenerationConfig(suppress_tokens=[0])}  # padding
    result = generator.generate(**batch, **own, **OPTIONS, output_logits=True)
    ids, wide = result.sequences[:, :-1], copy.deepcopy(model).float()
    in_float32 = {n: v.float() if v.is_floating_point() else v for n, v in batch.items()}
    with torch.no_grad():
        of_hf = model(**batch, decoder_input_ids=ids).logits.float()
        exact = wide(**in_float32, decoder_input_ids=ids).logits
    ours = torch.stack([*result.logits], dim=1).float()
    error, theirs = ((logits - exact).square().mean().sqrt() for logits in (ours, of_hf))
    assert 0 < error <= 1.3 * theirs < 0.5 * exact.square().mean().sqrt()


@pytest.mark.parametrize("name", first(TYPES, ("marian", "t5_gated", "whisper")))
def test_prompts_of_the_decoder_of_several_lengths(name):
    """Each row as alone: HF's decoders other than Whisper's count positions from the padding."""
    model = kept_whole(name)
    batch, rows = sources(model, *LENGTHS)
    starts = [[2], [2, 17, 40, 9], [2, 5]]
    expected = [
        hf_text(model, **row, decoder_input_ids=torch.tensor([start]))[0, len(start) :]
        for row, start in zip(rows, starts, strict=True)
    ]
    ids = torch.tensor([[0] * (4 - len(start)) + start for start in starts])
    mask = torch.tensor([[0] * (4 - len(start)) + [1] * len(start) for start in starts])
    own = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    text = SpeculativeGenerator(target_of(name), "lookup").generate(**batch, **own, **OPTIONS)
    assert text.sequences[:, 4:].equal(torch.stack(expected))


def force_padding(ids, scores):
    """The third new token is the padding id."""
    if ids.shape[1] != 3:
        return scores
    return torch.where(torch.arange(scores.shape[1]) == 0, scores, -torch.inf)


@pytest.mark.parametrize("name", ["m2m_100", "speech_to_text"])
def test_padding_in_mid_text_stands_at_the_position_that_hf_gives_it(name):
    model = kept_whole(name)
    batch, rows = sources(model, *LENGTHS)
    own = {"logits_processor": [force_padding]}
    text = SpeculativeGenerator(target_of(name), "lookup").generate(**batch, **own, **OPTIONS)
    expected = torch.cat([hf_text(model, **row, **own) for row in rows])
    assert text.sequences.equal(expected)
    assert bool((expected[:, 3] == 0).all())


@pytest.mark.parametrize("name", ["bart", "t5", "whisper"])
def test_a_draft_model_that_is_the_target_is_never_rejected(name):
    drafter = ModelDrafter(kept_whole(name), 3)
    batch, _ = sources(kept_whole(name), *LENGTHS)
    options = {**OPTIONS, "max_new_tokens": 13}
    stats = SpeculativeGenerator(target_of(name), drafter).generate(**batch, **options).stats
    assert stats.acceptance_length == 4


def test_a_draft_model_without_an_encoder():
    config = transformers.GPT2Config(vocab_size=99, n_embd=16, n_layer=1, n_head=2)
    drafter = ModelDrafter(transformers.GPT2LMHeadModel(config).eval(), 3)
    model = kept_whole("marian")
    batch, rows = sources(model, *LENGTHS)
    text = SpeculativeGenerator(target_of("marian"), drafter).generate(**batch, **OPTIONS).sequences
    assert text.equal(torch.cat([hf_text(model, **row) for row in rows]))


def counted(model, name, calls):
    model.get_encoder().register_forward_hook(lambda *_: calls.append(name))
    return model


def test_an_encoder_runs_once_in_a_call_and_not_where_the_call_brings_its_output():
    calls = []
    model = counted(build_whole("bart"), "target", calls)
    batch, _ = sources(model, *LENGTHS)
    generator = SpeculativeGenerator(model, "lookup")
    made = model.get_encoder()(**batch)
    calls.clear()
    expected = generator.generate(**batch, **OPTIONS).sequences
    assert calls == ["target"]
    own = {"encoder_outputs": made, "attention_mask": batch["attention_mask"]}
    assert generator.generate(**own, **OPTIONS).sequences.equal(expected)
    assert calls == ["target"]


def test_a_draft_model_runs_its_own_encoder_once_or_shares_that_of_the_target():
    calls = []
    model = build_whole("bart")
    draft = counted(build_whole("bart", seed=1), "draft", calls)
    batch, _ = sources(model, *LENGTHS)
    target = Target(model)
    expected = SpeculativeGenerator(target, None).generate(**batch, **OPTIONS).sequences
    generator = SpeculativeGenerator(target, ModelDrafter(draft))
    calls.clear()
    assert generator.generate(**batch, **OPTIONS).sequences.equal(expected)
    assert calls == ["draft"]
    made = model.get_encoder()(**batch)
    with refused("the draft model has an encoder of its own, and"):
        generator.generate(encoder_outputs=made, **OPTIONS)
    draft.model.encoder = model.model.encoder
    generator = SpeculativeGenerator(target, ModelDrafter(draft))
    assert generator.generate(**batch, **OPTIONS).sequences.equal(expected)
    assert hf_text(model, **batch, custom_generate=generator).equal(expected)
    assert calls == ["draft"]


def own_drafter(kind, target, draft):
    if kind == "self":
        return SelfDrafter(target)
    if kind == "layers":
        return SelfDrafter(target, layers=(0, 1))
    if kind == "joined":
        return FirstMatch(PromptLookupDrafter(3, min_ngram=3), ModelDrafter(draft, 3))
    return ModelDrafter(draft) if kind == "model" else kind


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("self", {}),
        ("layers", {}),
        ("joined", {}),
        ("suffix", {"prefill_chunk_size": 1}),
        ("lookahead", {}),
        ("model", {"draft_length": "auto"}),
        ("model", {"steps_ahead": 1}),
    ],
)
def test_other_drafters_and_settings(kind, options):
    model, target = kept_whole("bart"), target_of("bart")
    batch, rows = sources(model, *LENGTHS)
    drafter = own_drafter(kind, target, drafts_of("bart"))
    generator = pickle.loads(pickle.dumps(SpeculativeGenerator(target, drafter, **options)))
    text = generator.generate(**batch, **OPTIONS).sequences
    assert text.equal(torch.cat([hf_text(model, **row) for row in rows]))


def test_parts_that_cannot_be_are_refused():
    draft = ModelDrafter(drafts_of("bart"))
    batch, _ = sources(kept_whole("bart"), *LENGTHS)
    generator = SpeculativeGenerator(
        target_of("bart"), FirstMatch(draft, ModelDrafter(draft.model.whole))
    )
    with refused("expected one draft model with an encoder, and FirstMatch"):
        generator.generate(**batch, **OPTIONS)
    with refused("no layers of T5ForConditionalGeneration can be left out"):
        target_of("t5").part((0, 1))
    decoder_only = SpeculativeGenerator(zoo.load_target(), ModelDrafter(whisper_of_the_zoo()))
    with refused("a draft model with an encoder needs a target with one"):
        decoder_only.generate(torch.tensor([[5, 6]]), max_new_tokens=4)


def whisper_of_the_zoo():
    """An encoder-decoder with the vocabulary of the zoo."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16}
    sizes |= {"decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.WhisperConfig(vocab_size=2048, **sizes, pad_token_id=0)
    return transformers.WhisperForConditionalGeneration(config).eval()


@pytest.mark.parametrize("name", first(["bart", "t5", "whisper"], ["bart"]))
def test_sampled_text_passes_a_certificate(name):
    model = kept_whole(name)
    _, rows = sources(model, 12, 5)
    starts = torch.tensor([[2]]), torch.tensor([[2, 7]])
    pairs = zip(rows, starts, strict=True)
    prompts = [{**row, "decoder_input_ids": start} for row, start in pairs]
    sizes = {"num_samples": 2, "max_new_tokens": 6, "audit_tokens": 4, "progress": iter}
    generator = SpeculativeGenerator(target_of(name), ModelDrafter(drafts_of(name), 2))
    report = certify(generator, prompts, **sizes)
    assert report.passed
    assert report.text.num_tokens == 24


def test_a_certificate_sees_a_source_that_is_another_row_s(monkeypatch):
    """What was right in the self-test is broken afterwards."""
    model, read = build_whole("bart"), cross._read
    _, rows = sources(model, 12, 5)
    prompts = [{**row, "decoder_input_ids": torch.tensor([[2]])} for row in rows]
    generator = SpeculativeGenerator(Target(model), "lookup")
    monkeypatch.setattr(cross, "_read", lambda window: one_for_all(*read(window)))
    sizes = {"num_samples": 1, "max_new_tokens": 4, "audit_tokens": 4, "progress": iter}
    assert not certify(generator, prompts, **sizes).passed
    with refused("expected prompts with sources, since the target has an"):
        certify(generator, [[2, 7]], **sizes)


def one_for_all(table, mask):
    return table[:1].expand_as(table), mask


FAULTS = {
    "one_for_all": one_for_all,
    "without_mask": lambda table, mask: (table, torch.ones_like(mask)),
    "shifted": lambda table, mask: (table.roll(1, dims=4), mask),
    "values_shifted": lambda table, mask: (
        torch.stack([table[:, :, 0], table[:, :, 1].roll(1, dims=3)], dim=2),
        mask,
    ),
    "of_the_next_layer": lambda table, mask: (
        torch.stack([table[:, :, 0].roll(1, dims=1), table[:, :, 1]], dim=2),
        mask,
    ),
}


@pytest.mark.parametrize(
    ("name", "fault", "dtype"),
    diagonal(["bart", "t5", "marian"], FAULTS, [torch.float32, torch.bfloat16]),
)
def test_the_self_test_finds_a_fault_of_the_cross_attention(monkeypatch, name, fault, dtype):
    model, read = build_whole(name, dtype=dtype), cross._read
    monkeypatch.setattr(cross, "_read", lambda window: FAULTS[fault](*read(window)))
    check_found(model, monkeypatch, r"cannot be decoded .* differs from its plain forward")


def test_the_self_test_finds_biases_that_count_slots(monkeypatch):
    """In the window of a tree nodes stand at other positions."""
    model = build_whole("t5")
    assert Target(model).route.fault_of_trees is None
    make = cross.relative_bias
    by_slots = lambda attention, distances: make(attention, distances.roll(1, dims=2))  # noqa: E731
    monkeypatch.setattr(cross, "relative_bias", by_slots)
    with refused("cannot be decoded"):
        Target(model)


def made(kind, config, **own):
    torch.manual_seed(0)
    return kind(config(**own)).eval()


SIZES = {"vocab_size": 99, "d_model": 16, "d_ff": 16, "d_kv": 4, "num_layers": 2, "num_heads": 2}
REFUSED = {
    "umt5": (transformers.UMT5ForConditionalGeneration, transformers.UMT5Config, SIZES),
    "switch": (
        transformers.SwitchTransformersForConditionalGeneration,
        transformers.SwitchTransformersConfig,
        {**SIZES, "num_experts": 2},
    ),
    "prophetnet": (
        transformers.ProphetNetForConditionalGeneration,
        transformers.ProphetNetConfig,
        {
            **{"vocab_size": 99, "hidden_size": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
            **{"num_encoder_layers": 1, "num_decoder_layers": 1},
            **{"num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2},
        },
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_encoder_decoders_are_refused_by_name(name):
    kind, config, sizes = REFUSED[name]
    with pytest.raises(ValueError, match=rf"{kind.__name__} .*[Uu]se HF generate"):
        Target(made(kind, config, **sizes))


def test_a_decoder_that_was_loaded_without_its_encoder_says_what_loads_both():
    """As HF's users load distil-whisper to assist."""
    alone = transformers.WhisperForCausalLM(copy.deepcopy(kept_whole("whisper").config)).eval()
    with pytest.raises(ValueError, match=r"WhisperForCausalLM .* load it with its encoder \(Auto"):
        ModelDrafter(alone)


def test_a_model_in_training_mode_is_refused_and_one_changed_later_is_noticed():
    model = build_whole("bart")
    generator = SpeculativeGenerator(model, "lookup")
    batch, _ = sources(model, *LENGTHS)
    with refused("BartForConditionalGeneration is in training mode"):
        Target(build_whole("bart").train())
    model.train()
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        generator.generate(**batch, **OPTIONS)
    model.eval()
    with torch.no_grad():
        model.model.decoder.layers[1].encoder_attn.k_proj.weight.mul_(2)
    expected = hf_text(model, **batch)
    assert generator.generate(**batch, **OPTIONS).sequences.equal(expected)
    model.model.decoder.layers[1].encoder_attn.out_proj = torch.nn.Linear(32, 32)
    with refused("was edited after specdec wrapped it"):
        generator.generate(**batch, **OPTIONS)
    generator.refresh()
    expected = hf_text(model, **batch)
    assert generator.generate(**batch, **OPTIONS).sequences.equal(expected)


def test_hooks_of_the_user_act_as_in_hf():
    model = build_whole("bart")
    scale = lambda module, args, out: 1.5 * out  # noqa: E731
    model.model.decoder.layers[1].register_forward_hook(scale)
    model.model.encoder.layers[0].register_forward_hook(scale)
    batch, rows = sources(model, *LENGTHS)
    expected = torch.cat([hf_text(model, **row) for row in rows])
    assert (
        SpeculativeGenerator(model, "lookup").generate(**batch, **OPTIONS).sequences.equal(expected)
    )


def test_rows_that_end_leave_with_their_sources():
    model = kept_whole("marian")
    batch, rows = sources(model, *LENGTHS)
    texts = [hf_text(model, **row)[0] for row in rows]
    end = int(texts[0][3])
    generator = SpeculativeGenerator(target_of("marian"), "lookup", graphs=False)
    options = {**OPTIONS, "eos_token_id": end}
    found = generator.generate(**batch, **options).sequences
    for row, text in zip(found, texts, strict=True):
        ends = (text[1:] == end).nonzero()
        length = 2 + int(ends[0]) if len(ends) else len(text)
        assert row[:length].equal(text[:length])


CAPTURED = [(name, kind) for name in ("bart", "t5", "whisper", "trocr") for kind in DRAFTERS[2:4]]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", first(CAPTURED, [("bart", "model")]), ids="-".join)
def test_captured_steps_are_eager_ones(case, place):
    name, kind = case
    model, draft = build_whole(name).to(place), noisy(build_whole(name), name).to(place)
    drafter, target = ModelDrafter(draft, tree="8x3" if kind == "tree" else None), Target(model)
    generator = SpeculativeGenerator(target, drafter, graphs=True)
    for lengths in (LENGTHS, (70, 3, 5)):  # another length of the sources
        batch = {n: v.to(place) for n, v in sources(model, *lengths)[0].items()}
        eager = SpeculativeGenerator(target, drafter, graphs=False)
        expected = eager.generate(**batch, **OPTIONS).sequences
        assert generator.generate(**batch, **OPTIONS, check=True).sequences.equal(expected)


def test_the_memory_of_sources_is_explained():
    """Keys and values of 3 layers, 32 wide, 4 bytes each."""
    words = "cross attention of 3 layers keeps 0.8 kB of each position of a row's source: 0.0 MB"
    assert words in SpeculativeGenerator(target_of("whisper"), None).explain()


def test_a_text_longer_than_the_positions_of_a_decoder():
    batch, _ = sources(kept_whole("whisper"), 1)
    generator = SpeculativeGenerator(target_of("whisper"), "lookup")
    with refused("but the target has 120 positions"):
        generator.generate(**batch, max_new_tokens=120)
    text = generator.generate(**batch, **{**OPTIONS, "max_new_tokens": 119}).sequences
    own = {"max_new_tokens": 119, "do_sample": False, "eos_token_id": None}
    assert text.equal(GenerationMixin.generate(kept_whole("whisper"), **batch, **own))
