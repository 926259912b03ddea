"""Every kind of adapter that the installed PEFT has: the text is that of the wrapper's own
`generate`, or the wrapper is refused by name.
"""

import pytest
import torch
from architectures import VOCAB, build
from drafting import ragged_prompts

from specdec import SpeculativeGenerator

peft = pytest.importorskip("peft")
KINDS = {kind.value: made for kind, made in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
IDS, MASK = ragged_prompts(VOCAB, 3, 6)
GREEDY = {"max_new_tokens": 10, "do_sample": False}

IN_PRODUCTS = {"target_modules": ["q_proj", "v_proj"]}
OPTIONS = {
    "ADALORA": {**IN_PRODUCTS, "total_step": 10, "tinit": 1, "tfinal": 1},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2},
    "BOFT": {**IN_PRODUCTS, "boft_block_size": 4},
    "C3A": {**IN_PRODUCTS, "block_size": 8},
    "CARTRIDGE": {"num_virtual_tokens": 4},
    "CPT": {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]},
    "FOURIERFT": {**IN_PRODUCTS, "n_frequency": 50},
    "HRA": {**IN_PRODUCTS, "r": 4},
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MISS": {**IN_PRODUCTS, "r": 4},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 4, "num_tasks": 2},
    "OFT": {**IN_PRODUCTS, "oft_block_size": 4},
    "POLY": {**IN_PRODUCTS, "n_tasks": 3, "n_skills": 2, "r": 2},
    "PREFIX_TUNING": {"num_virtual_tokens": 4},
    "PROMPT_TUNING": {"num_virtual_tokens": 4},
    "PSOFT": {**IN_PRODUCTS, "r": 4},
    "P_TUNING": {"num_virtual_tokens": 4},
    "ROAD": {**IN_PRODUCTS, "variant": "road_1", "group_size": 8},
    "SHIRA": {**IN_PRODUCTS, "r": 4},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2, 3], "target_modules": ["embed_tokens"]},
    "VBLORA": {**IN_PRODUCTS, "r": 2, "num_vectors": 8, "vector_length": 8, "topk": 2},
    "WAVEFT": {**IN_PRODUCTS, "n_frequency": 50},
}
"""Sizes that fit the model; others are adapters of two products."""

VIRTUAL = r"the adapter 'default' \(\w+\) puts virtual tokens before the text"
REFUSED = {
    **dict.fromkeys(["CARTRIDGE", "CPT", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING"], VIRTUAL),
    "MULTITASK_PROMPT_TUNING": VIRTUAL,
    "LILY": "its own forward depends on how a text is cut into calls",
    "POLY": "task_ids should not be None",
    "SHADOW": "ShadowCarrier",
}
LORAS = {
    "dora": {"use_dora": True},
    "bias": {"lora_bias": True},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "a head of its own": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [1, 2, 3]},
    "layers repeated": {"layer_replication": [[0, 2], [1, 3]]},
    "weights": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
}


def trained(model, config):
    """With weights that act."""
    model = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.requires_grad and "base_layer" not in name:
            noise = torch.randn(weight.shape, generator=generator)
            weight.data.add_(0.2 * noise.to(weight.dtype))
    return model


def text_of(model, **options):
    return model.generate(input_ids=IDS, attention_mask=MASK, pad_token_id=0, **GREEDY, **options)


def check_equal(wrapped):
    expected = text_of(wrapped)
    assert not expected.equal(text_of(build("llama")))  # it acts
    generator = SpeculativeGenerator(wrapped, None)
    assert generator.generate(IDS, MASK, **GREEDY).sequences.equal(expected)
    assert text_of(wrapped, custom_generate=generator).equal(expected)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"XLORA"}))
def test_text_is_the_wrapper_s_own_or_it_is_refused_by_name(kind):
    try:
        config = KINDS[kind](task_type="CAUSAL_LM", **OPTIONS.get(kind, IN_PRODUCTS))
    except ImportError as error:
        pytest.skip(str(error))
    wrapped = trained(build("llama"), config)
    if kind in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[kind]):
            SpeculativeGenerator(wrapped, None)
    else:
        check_equal(wrapped)


@pytest.mark.parametrize("name", LORAS)
def test_text_is_that_of_every_kind_of_lora(name):
    options = {**IN_PRODUCTS, "r": 4, "lora_alpha": 32, **LORAS[name]}
    check_equal(trained(build("llama"), peft.LoraConfig(task_type="CAUSAL_LM", **options)))


def mixture(folder):
    """X-LoRA: a mixture of adapters, by a classifier that reads the text before every forward."""
    for number in range(2):
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2 + number, **IN_PRODUCTS)
        trained(build("llama"), config).save_pretrained(folder / str(number))
    model = build("llama")
    model.config.use_cache = False
    paths = {str(number): str(folder / str(number)) for number in range(2)}
    config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, xlora_depth=1, adapters=paths)
    return trained(model, config)


def test_a_mixture_that_a_wrapper_makes_is_refused_by_its_name(tmp_path):
    wrapped = mixture(tmp_path)
    assert not text_of(wrapped).equal(text_of(build("llama")))
    names = r"PeftModelForCausalLM \(XLoraConfig\) writes other text than the LlamaForCausalLM"
    with pytest.raises(ValueError, match=names):
        SpeculativeGenerator(wrapped, None)
    base = SpeculativeGenerator(wrapped.get_base_model(), None)
    with pytest.raises(ValueError, match="a hook or replaced forward"):
        text_of(wrapped, custom_generate=base)


def test_adapters_of_several_kinds_are_in_the_layers():
    model = peft.PeftMixedModel(build("llama"), peft.LoraConfig(r=4, **IN_PRODUCTS), "one")
    model.add_adapter("two", peft.LoHaConfig(r=4, **IN_PRODUCTS))
    model.set_adapter(["one", "two"])
    for name, weight in model.named_parameters():
        if "lora_" in name or "hada_" in name:
            weight.data.normal_(0, 0.2)
    check_equal(model.eval())
