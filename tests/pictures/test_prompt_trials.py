"""What is read wrongly, or cannot be read, is found and refused in words."""

from dataclasses import replace

import pytest
import torch
import transformers
from architectures import VOCAB
from architectures import build as build_text
from diagonal import case, diagonal
from drafting import ragged_prompts
from pictured_models import FAMILIES, GRIDS, IMAGE, SMALL, TEXT, build, prompts, text_of_hf
from refusals import refused
from transformers import GenerationConfig

from specdec import ModelDrafter, SpeculativeGenerator, Target
from specdec.hf.prompts import TEXT_ONLY
from specdec.targets.prompt_inputs import PromptChunk, PromptInputs
from specdec.targets.reading import refuse_prompts
from specdec.targets.trial import prompts as trial_of_prompts

DIFFERS = "its logits differ from those of HF generate by"


def generate(model, inputs, **options):
    return SpeculativeGenerator(model, None).generate(**inputs, max_new_tokens=4, **options)


def with_inputs(monkeypatch, change):
    """Every prompt is read, and then changed."""
    read = trial_of_prompts.inputs_of
    monkeypatch.setattr(trial_of_prompts, "inputs_of", lambda *args: change(read(*args)))


def offset_of_the_padding(patch):
    def of_padding(read):
        return replace(read, position_offset=torch.zeros_like(read.position_offset))

    with_inputs(patch, of_padding)


def cut(patch):
    def sizes(read, size):
        end = max(read.lengths)
        return [min(size, end - start) for start in range(0, end, size)]

    patch.setattr(PromptInputs, "chunk_sizes", sizes)


def seen_as_text(patch):
    with_inputs(patch, lambda read: replace(read, visible={}))


def stale_deepstack(patch):
    """Every chunk gets the embeddings of the first tokens that were marked."""
    arguments = PromptChunk.arguments

    def stale(chunk, *args):
        found = arguments(chunk, *args)
        if found["deepstack_visual_embeds"] is not None:
            layers = chunk.inputs.marked["deepstack_visual_embeds"][1]
            count = len(found["deepstack_visual_embeds"][0])
            found["deepstack_visual_embeds"] = [layer[:count] for layer in layers]
        return found

    patch.setattr(PromptChunk, "arguments", stale)


def no_modality_for_experts(patch):
    def without(read):
        rest = {n: v for n, v in read.arguments.items() if n != "moe_mm_token_type_ids"}
        return replace(read, arguments=rest)

    with_inputs(patch, without)


FAULTS = {
    offset_of_the_padding: GRIDS,
    cut: ["gemma3", "gemma4_vision", "paligemma"],
    seen_as_text: ["gemma3", "gemma4_vision"],
    stale_deepstack: ["qwen3_vl", "qwen3_vl_moe"],
    no_modality_for_experts: ["ernie4_5_vl_moe"],
}
DEAR = [(cut, "gemma3"), (cut, "gemma4_vision")]
DEAR += [(offset_of_the_padding, name) for name in ("ernie4_5_vl_moe", "qwen3_5")]


@pytest.mark.parametrize(
    ("fault", "name"), [case([f, n], (f, n) not in DEAR) for f in FAULTS for n in FAULTS[f]]
)
def test_a_prompt_that_is_read_wrongly_is_found(monkeypatch, fault, name):
    generate(build(name), prompts(name))
    fault(monkeypatch)
    with refused(DIFFERS):
        generate(build(name), prompts(name))


def mllama():
    """Its gates are not 0, or nobody would see its pictures."""
    text = TEXT | {"cross_attention_layers": [1, 3], "model_type": "mllama_text_model"}
    vision = {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "image_size": 8},
        **{"num_global_layers": 1, "attention_heads": 4, "patch_size": 4, "max_num_tiles": 2},
        **{"intermediate_layers_indices": [0, 1], "vision_output_dim": 96},
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    }
    config = transformers.MllamaConfig(
        text_config=text, vision_config=vision, image_token_index=IMAGE
    )
    torch.manual_seed(0)
    model = transformers.MllamaForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0, 0.15 if parameter.dim() > 1 or "gate" in name else 0)
        if parameter.dim() == 1 and "gate" not in name:
            parameter.data.fill_(1)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def mllama_prompts():
    torch.manual_seed(1)
    ids = torch.tensor([[5, IMAGE, 6, 7, 8], [0, 9, 10, 11, 12]])
    mask = (ids != 0).long()
    crossed = torch.zeros(2, 5, 1, 2, dtype=torch.long)
    crossed[0, 1:, 0, 0] = 1
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": torch.randn(2, 1, 2, 3, 8, 8),
        "aspect_ratio_ids": torch.tensor([[1], [1]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0]], [[1, 0]]]),
        "cross_attention_mask": crossed,
    }


def test_cross_attention_is_refused_by_name_and_would_be_found_without_it(monkeypatch):
    try:
        generator = SpeculativeGenerator(mllama(), None)
    except ValueError as error:
        pytest.skip(f"refused for text, too: {error}")
    with refused("Mllama .. cross attention in every step .. HF generate"):
        generator.generate(**mllama_prompts(), max_new_tokens=4)
    monkeypatch.delitem(TEXT_ONLY, "mllama")
    with pytest.raises(ValueError, match=r"cross_attention|differ"):
        generator.generate(**mllama_prompts(), max_new_tokens=4)


@pytest.mark.parametrize("kind", sorted(TEXT_ONLY))
def test_known_types_are_refused_with_the_reason(monkeypatch, kind):
    model = build("llava")
    monkeypatch.setattr(type(model.config), "model_type", kind)
    with pytest.raises(ValueError, match="with pictures, sound or embeddings") as found:
        refuse_prompts(model)
    assert TEXT_ONLY[kind] in str(found.value)


def test_a_class_that_generates_in_its_own_way_is_refused(monkeypatch):
    model = build("llava")
    own = type("Own", (type(model),), {"generate": lambda self, **inputs: None})
    monkeypatch.setattr(model, "__class__", own)
    with refused("a generate() of its own"):
        refuse_prompts(model)


def without_an_end(inputs):
    return {n: v if n.startswith(("pixel", "image")) else v[:, :-1] for n, v in inputs.items()}


def with_fewer_places(inputs):
    ids = inputs["input_ids"]
    return inputs | {"input_ids": torch.where(ids == IMAGE, 7, ids)}


def without_types(inputs):
    return {name: value for name, value in inputs.items() if name != "token_type_ids"}


def of_text(name, *shape, dtype=torch.float32, **more):
    """A prompt of a model of texts, with an input of some shape."""
    return lambda: (build_text("llama"), {name: torch.zeros(shape, dtype=dtype), **more})


IDS = torch.tensor([[1, 2]])
REFUSED = {
    "padded on the right .. padding_side='left'": lambda: changed(
        "llava", lambda x: x | {"attention_mask": x["attention_mask"].flip(1)}
    ),
    "row_inputs .. position_offset .. leave it out": lambda: changed(
        "llava", lambda x: x | {"row_inputs": {"position_offset": [1] * 3}}
    ),
    "mage features": lambda: changed("llava", with_fewer_places),  # the model's own error
    "row 0 ends in a picture .. chat templates": lambda: changed(
        "qwen3_vl", without_an_end, [[5, 6, SMALL]]
    ),
    "sees its whole prompt both ways .. token_type_ids": lambda: changed(
        "paligemma", without_types, ([5, 6, 7],)
    ),
    "LlamaForCausalLM has no such input": of_text("pixel_values", 1, input_ids=IDS),
    "did you mean 'temperature'": of_text("temprature", 1, input_ids=IDS),
    "inputs_embeds": of_text("inputs_embeds", 2, 5, 31),
    "inputs_embeds must be float32": of_text("inputs_embeds", 2, 5, 32, dtype=torch.float64),
    "inputs_embeds is empty": of_text("inputs_embeds", 2, 0, 32),
    "of other prompts; leave input_ids out": of_text("inputs_embeds", 1, 3, 32, input_ids=IDS),
}


def changed(name, change, *ids):
    """A model and prompts with pictures, changed."""
    return build(name), change(prompts(name, *ids))


@pytest.mark.parametrize("words", REFUSED)
def test_prompts_that_cannot_be_right(words):
    with refused(words):
        generate(*REFUSED[words]())


def test_a_prefix_longer_than_a_sliding_window():
    """The first step reads the last token again, and its window hides what the prefix showed."""
    fields = FAMILIES["paligemma"][1]
    gemma2 = {"model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8}
    gemma2 |= {"attn_logit_softcapping": None}  # which sdpa leaves out before transformers 5.24
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2}
    inputs, models = prompts("paligemma"), {}
    for window in (40, 7):
        text = TEXT | gemma2 | kinds | {"sliding_window": window}
        config = transformers.PaliGemmaConfig(**fields | {"text_config": text})
        torch.manual_seed(0)
        models[window] = transformers.PaliGemmaForConditionalGeneration(config).eval()
        models[window].generation_config = GenerationConfig(pad_token_id=0)
    assert generate(models[40], inputs).texts == text_of_hf(models[40], inputs, 4)
    with refused("longer than a sliding window of PaliGemma"):
        generate(models[7], inputs)


def test_prompts_of_which_the_decoder_gets_something_else_are_tried_too(monkeypatch):
    """The same inputs by their names; HF makes masks of them where it made none before."""
    model, tried = build("gemma3"), []
    compare = trial_of_prompts.compare_prompts
    monkeypatch.setattr(
        trial_of_prompts, "compare_prompts", lambda *args: tried.append(1) or compare(*args)
    )
    generator = SpeculativeGenerator(model, None)
    plain = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}
    plain["attention_mask"] = torch.ones_like(plain["input_ids"])
    for types, count in ((0, 1), (0, 1), (1, 2), (1, 2), (0, 2)):
        marks = torch.zeros_like(plain["input_ids"])
        marks[0, 1:4] = types  # as of a picture, which see each other
        inputs = plain | {"token_type_ids": marks}
        result = generator.generate(**inputs, max_new_tokens=4)
        assert len(tried) == count
        assert result.texts == text_of_hf(model, inputs, 4)


@pytest.mark.parametrize(
    ("drafter", "name"),
    diagonal(
        [None, "lookup", "model"],
        ["llama", "gpt2", "gemma2", "gemma3", "mpt", "qwen3_moe", "qwen3_5"],
    ),
)
def test_embeddings_are_continued_as_by_hf(name, drafter):
    """Soft prompts; the last token of each has no id, too."""
    model = build_text(name)
    ids, mask = ragged_prompts(VOCAB, 1, 3, 7)
    torch.manual_seed(1)
    embeds = model.get_input_embeddings()(ids).detach()
    embeds = embeds + 0.1 * torch.randn_like(embeds)
    inputs = {"inputs_embeds": embeds, "attention_mask": mask}
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(**inputs, **options)
    if drafter == "model":
        drafter = ModelDrafter(build_text("llama", seed=1), 3)
    generator = SpeculativeGenerator(model, drafter, prefill_chunk_size=3)
    result = generator.generate(**inputs, max_new_tokens=12)
    assert torch.equal(result.sequences, wanted)
    hooked = model.generate(**inputs, **options, custom_generate=generator)
    assert torch.equal(hooked, wanted)


def test_embeddings_with_penalties_criteria_and_ends_as_by_hf():
    model = build_text("llama")
    embeds = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 12, "do_sample": False, "min_new_tokens": 6}
    options |= {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "pad_token_id": 0}
    seen = []

    def stops(ids, scores):
        seen.append(ids.shape)
        return torch.zeros(len(ids), dtype=torch.bool)

    plain = model.generate(inputs_embeds=embeds, **options)
    options = {"generation_config": GenerationConfig(**options), "stopping_criteria": [stops]}
    generator = SpeculativeGenerator(model, "lookup")
    result = generator.generate(inputs_embeds=embeds, **options)
    assert torch.equal(result.sequences, plain)
    assert min(shape[1] for shape in seen) == 1  # embeddings are shown nobody
    captured = SpeculativeGenerator(model, "lookup", graphs=True)
    for _ in range(2):
        again = captured.generate(inputs_embeds=embeds, max_new_tokens=12, check=True)
        only = model.generate(inputs_embeds=embeds, max_new_tokens=12, pad_token_id=0)
        assert torch.equal(again.sequences, only)


def test_plain_embeddings_beside_their_ids_are_read_as_the_ids():
    model = build_text("llama")
    ids, mask = ragged_prompts(VOCAB, 2, 5)
    embeds = model.get_input_embeddings()(ids).detach()
    generator = SpeculativeGenerator(model, "lookup")
    plain = generator.generate(ids, mask, max_new_tokens=9)
    both = generator.generate(ids, mask, inputs_embeds=embeds, max_new_tokens=9)
    assert torch.equal(both.sequences, plain.sequences)


def test_an_edited_target_reads_pictures_with_its_edits():
    def stop_short(view):
        view.model.language_model.layers[1].self_attn.scaling = 0.1

    inputs = prompts("qwen3_vl")
    plain = generate(build("qwen3_vl"), inputs).texts
    target = Target(build("qwen3_vl"), edits=(stop_short,))
    texts = {}
    for size in (2, 100):
        generator = SpeculativeGenerator(target, "lookup", prefill_chunk_size=size)
        texts[size] = generator.generate(**inputs, max_new_tokens=4).texts
    assert texts[2] == texts[100] != plain
