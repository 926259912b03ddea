"""What calls of encoder-decoders bring, natively and through HF's hook, and what is not read."""

import gc
import pickle

import pytest
import torch
import transformers
from encoder_decoders import build_whole, kept_whole, sources
from transformers import GenerationConfig, GenerationMixin

from specdec import ModelDrafter, SpeculativeGenerator, Target, evaluate
from specdec.graphs.tree import parts_of
from specdec.slots.cache import SlotCache

OPTIONS = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": []}
LENGTHS = 12, 5


def generator_of(name, drafter="lookup"):
    return SpeculativeGenerator(Target(kept_whole(name)), drafter)


def hf_text(model, **given):
    return GenerationMixin.generate(model, **{**OPTIONS, "eos_token_id": None}, **given)


def test_a_source_comes_as_arguments_or_as_one_object():
    model, generator = kept_whole("bart"), generator_of("bart")
    batch, _ = sources(model, *LENGTHS)
    expected = hf_text(model, **batch)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert generator.generate(ids, mask, **OPTIONS).sequences.equal(expected)
    as_one = transformers.BatchEncoding(batch)
    assert generator.generate(as_one, **OPTIONS).sequences.equal(expected)
    embeds = model.get_encoder().embed_tokens(ids)
    own = {"inputs_embeds": embeds, "attention_mask": mask}
    assert generator.generate(**own, **OPTIONS).sequences.equal(expected)


def test_a_decoder_begins_as_in_hf():
    model, generator = kept_whole("bart"), generator_of("bart")
    batch, _ = sources(model, *LENGTHS)
    for own in (
        {"decoder_start_token_id": 7},
        {"decoder_input_ids": torch.tensor([[2, 9], [2, 4]])},
    ):
        found = generator.generate(**batch, **own, **OPTIONS).sequences
        assert found.equal(hf_text(model, **batch, **own))
    config = GenerationConfig(decoder_start_token_id=7)
    found = generator.generate(**batch, generation_config=config, **OPTIONS).sequences
    assert found.equal(hf_text(model, **batch, decoder_start_token_id=7))
    config = GenerationConfig(forced_bos_token_id=33, no_repeat_ngram_size=2)
    found = generator.generate(**batch, generation_config=config, **OPTIONS).sequences
    own = {"forced_bos_token_id": 33, "no_repeat_ngram_size": 2}
    assert found.equal(hf_text(model, **batch, **own))


def test_settings_that_checkpoints_ship():
    """Of Marian and BART: beams are turned off by the call."""
    model = build_whole("marian")
    shipped = {"num_beams": 4, "bad_words_ids": [[51]], "forced_eos_token_id": 2}
    shipped |= {"no_repeat_ngram_size": 3, "min_length": 3, "forced_bos_token_id": 9}
    model.generation_config.update(**shipped)
    generator = SpeculativeGenerator(model, "lookup")
    batch, _ = sources(model, *LENGTHS)
    with pytest.raises(ValueError, match="num_beams=4 is not supported"):
        generator.generate(**batch, max_new_tokens=10)
    expected = GenerationMixin.generate(model, **batch, max_new_tokens=10, num_beams=1)
    config = GenerationConfig(num_beams=1)
    found = generator.generate(**batch, max_new_tokens=10, generation_config=config)
    assert found.sequences.equal(expected)
    own = {"max_new_tokens": 10, "num_beams": 1, "custom_generate": generator}
    assert GenerationMixin.generate(model, **batch, **own).equal(expected)


def test_adapters_of_peft():
    peft, model = pytest.importorskip("peft"), build_whole("bart")
    kind = peft.TaskType.SEQ_2_SEQ_LM
    torch.manual_seed(0)
    config = peft.LoraConfig(
        task_type=kind, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    adapted = peft.get_peft_model(model, config).eval()
    batch, _ = sources(model, *LENGTHS)
    generator = SpeculativeGenerator(adapted, "lookup")
    own = {**OPTIONS, "eos_token_id": None}
    expected = adapted.generate(**batch, **own)
    with adapted.disable_adapter():
        assert not adapted.generate(**batch, **own).equal(expected)
    assert generator.generate(**batch, **OPTIONS).sequences.equal(expected)
    assert adapted.generate(**batch, **own, custom_generate=generator).equal(expected)
    names = {"adapter": ["default", "__base__"]}
    with pytest.raises(
        ValueError, match=r"\['adapter'\] is not supported for a target with an enc"
    ):
        generator.generate(**batch, row_inputs=names, **OPTIONS)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_masks_with_holes(name):
    model = kept_whole(name)
    batch, _ = sources(model, 12, 9, 12)
    batch["attention_mask"][0, [3, 4, 11]] = 0
    batch["attention_mask"][2, 1:11] = 0
    expected = hf_text(model, **batch)
    assert generator_of(name).generate(**batch, **OPTIONS).sequences.equal(expected)


def test_several_samples_of_each_source():
    model = kept_whole("marian")
    batch, rows = sources(model, *LENGTHS)
    options = {"max_new_tokens": 6, "temperature": 1.0, "top_k": 0, "eos_token_id": []}
    generator = generator_of("marian")
    found = generator.generate(**batch, num_return_sequences=2, seed=[3, 8], **options).sequences
    alone = generator.generate(**rows[1], seed=9, **options).sequences
    assert found[3].equal(alone[0])
    twice = {"do_sample": True, "num_return_sequences": 2, "custom_generate": generator}
    own = {"max_new_tokens": 6, "eos_token_id": None, "top_k": 0, "seed": [3, 4, 8, 9]}
    assert GenerationMixin.generate(model, **batch, **own, **twice).equal(found)
    twice["custom_generate"] = SpeculativeGenerator(
        generator.target, ModelDrafter(build_whole("bart"))
    )
    coupled = GenerationMixin.generate(model, **batch, **own, **twice)
    assert coupled.shape == found.shape


def stores_of(num_bytes):
    """Addresses of the storage of so many bytes or more that Python's tensors have."""
    alive = [one for one in gc.get_objects() if type(one) is torch.Tensor and not one.is_meta]
    stores = [one.untyped_storage() for one in alive]
    return {store.data_ptr() for store in stores if store.nbytes() >= num_bytes}


@pytest.mark.parametrize("drafter", ["lookup", "model"])
def test_keys_and_values_of_the_cross_attention_stand_once_and_leave_with_the_call(drafter):
    size = 12 * 2 * 3 * 64 * 32 * 4  # rows, keys and values, layers, positions, width
    batch, _ = sources(kept_whole("whisper"), *[1] * 12)
    drafter = ModelDrafter(build_whole("whisper", seed=1)) if drafter == "model" else drafter
    generator, before = generator_of("whisper", drafter), stores_of(size // 2)
    generation = generator.start(**batch, **OPTIONS)
    made, state = stores_of(size // 2) - before, generation.state
    tables = [x for n, x in state.cache.row_inputs.items() if n.endswith("source_cache")]
    assert [table.nbytes for table in tables] == [size] * (1 if drafter == "lookup" else 2)
    slots = [store for cache in parts_of(state, SlotCache) for store in cache.stores]
    assert made == {one.untyped_storage().data_ptr() for one in (*tables, *slots)}
    generation.close()
    result = generator.generate(**batch, **OPTIONS)
    assert pickle.loads(pickle.dumps(result.row_inputs)) == {}
    del generation, generator, tables, slots, state
    assert not stores_of(size // 2) - before


def test_rows_that_fill_a_captured_batch_have_no_source():
    model = kept_whole("bart")
    batch, _ = sources(model, 12, 5, 9)
    drafter = ModelDrafter(build_whole("bart", seed=1), 2)
    generator = SpeculativeGenerator(Target(model), drafter, graphs=True)
    found = generator.generate(**batch, **OPTIONS, check=True)
    assert found.sequences.equal(hf_text(model, **batch))
    assert generator.explain().count("captured in") > 0


def test_settings_that_read_the_source_run_through_the_hook():
    model = build_whole("bart")
    generator = SpeculativeGenerator(model, "lookup")
    batch, _ = sources(model, *LENGTHS)
    model.generation_config.encoder_no_repeat_ngram_size = 1
    expected = hf_text(model, **batch)
    with pytest.raises(ValueError, match=r"encoder_no_repeat_ngram_size=1 reads the ids of the so"):
        generator.generate(**batch, **OPTIONS)
    assert hf_text(model, **batch, custom_generate=generator).equal(expected)
    off = GenerationConfig(encoder_no_repeat_ngram_size=0)
    plain = generator.generate(**batch, generation_config=off, **OPTIONS).sequences
    assert not plain.equal(expected)


def test_hf_s_record_through_the_hook():
    model, generator = kept_whole("t5"), generator_of("t5")
    batch, _ = sources(model, *LENGTHS)
    own = {"return_dict_in_generate": True, "output_logits": True}
    expected = hf_text(model, **batch, **own)
    found = hf_text(model, **batch, **own, custom_generate=generator)
    assert found.sequences.equal(expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits))


def test_streams_traces_and_steps_by_hand():
    model, generator = kept_whole("bart"), generator_of("bart")
    batch, _ = sources(model, *LENGTHS)
    expected = generator.generate(**batch, **OPTIONS)
    assert sum(len(record.rows) for record in generator.stream(**batch, **OPTIONS)) > 2
    traced = generator.generate(**batch, **OPTIONS, trace=True)
    assert traced.sequences.equal(expected.sequences)
    generation = generator.start(**batch, **OPTIONS)
    while not generation.has_ended.all():
        generator.step(generation)
    assert generation.tokens[:, :11].equal(expected.sequences)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "reads a source by its encoder: expected input_ids or encoder_outputs, got nothing"),
        (
            {"input_features": torch.zeros(1, 4, 4)},
            "expected input_ids or encoder_outputs, got not",
        ),
        ({"input_ids": torch.tensor([[5]]), "language": "en"}, "language"),
        (
            {"input_ids": torch.tensor([[5], [0]]), "attention_mask": torch.tensor([[1], [0]])},
            "row 1 of the source is all padding; every source needs at least one token",
        ),
    ],
)
def test_what_is_no_source_is_refused(given, words):
    with pytest.raises((TypeError, ValueError), match=words):
        generator_of("bart").generate(**given, **OPTIONS)


def test_a_recording_longer_than_the_encoder_reads():
    with pytest.raises(ValueError, match="has 101 frames, and the encoder reads 100 at once; call"):
        generator_of("whisper").generate(input_features=torch.zeros(1, 16, 101), **OPTIONS)


def test_a_hook_of_another_model_and_a_target_without_its_source():
    batch, _ = sources(kept_whole("bart"), *LENGTHS)
    with pytest.raises(ValueError, match="called on another model than the generator's target"):
        hf_text(kept_whole("bart"), **batch, custom_generate=generator_of("marian"))
    target = Target(kept_whole("bart"))
    cache, text = target.init_cache(batch_size=1, num_slots=32), torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match="expected the source of each row, which an encoder-decod"):
        target.prefill(cache, text, torch.tensor([2]), offset=0)
    with pytest.raises(ValueError, match="expected encoder_outputs"):
        target.model(input_ids=text)


def test_sources_of_single_rows_and_sources_padded_on_the_left():
    model, generator = kept_whole("bart"), generator_of("bart")
    batch, rows = sources(model, *LENGTHS)
    expected = generator.generate(**batch, **OPTIONS).sequences
    starts = torch.tensor([[2], [2]])
    own = {"row_inputs": {"prompt": rows}}
    assert generator.generate(starts, **own, **OPTIONS).sequences.equal(expected)
    left = {name: value.clone() for name, value in batch.items()}
    for value in left.values():
        value[1] = value[1].roll(LENGTHS[0] - LENGTHS[1])
    assert generator.generate(**left, **OPTIONS).sequences.equal(expected)
    with pytest.raises(ValueError, match=r"has the sources of 2 rows, so input_ids must be the pr"):
        generator.generate(torch.tensor([[2]]), **own, **OPTIONS)


def test_evaluations_of_texts_and_of_sources():
    generator = generator_of("bart")
    _, rows = sources(kept_whole("bart"), *LENGTHS)
    texts = [row["input_ids"][0].tolist() for row in rows]
    plain = evaluate(generator, texts, max_new_tokens=6, batch_size=2)
    prompts = [{**row, "decoder_input_ids": torch.tensor([[2]])} for row in rows]
    found = evaluate(generator, prompts, max_new_tokens=6)
    assert [row.new_tokens for row in plain.rows] == [row.new_tokens for row in found.rows]
    sound = {**sources(kept_whole("whisper"), 1)[0], "decoder_input_ids": torch.tensor([[2]])}
    assert len(evaluate(generator_of("whisper"), [sound], max_new_tokens=6).rows[0].new_tokens) == 6


def test_what_calls_of_a_size_need_is_made_before_the_first():
    generator = SpeculativeGenerator(kept_whole("whisper"), "lookup", graphs=True)
    generator.warm_up(rows=2, tokens=16)
    batch, _ = sources(kept_whole("whisper"), 1, 1)
    expected = generator_of("whisper").generate(**batch, **OPTIONS).sequences
    captured = generator.explain().count("captured in")
    assert generator.generate(**batch, **OPTIONS).sequences.equal(expected)
    assert captured > 0
    assert generator.explain().count("captured in") == captured
