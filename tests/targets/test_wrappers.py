"""`torch.compile` and PEFT wrappers are taken off where the model inside is the whole truth, and
refused with the line that works where it is not.
"""

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from torch import nn

from specdec import ModelDrafter, SpeculativeGenerator, Target
from specdec.drafters import EagleDrafter
from specdec.targets.wrappers import unwrap

IDS, MASK = ragged_prompts(VOCAB, 3, 6)
GREEDY = {"max_new_tokens": 10, "do_sample": False}
FEW = {"disable": True}  # of torch.compile: the wrapper without a compiler


def text_of(model):
    return model.generate(IDS, attention_mask=MASK, pad_token_id=0, **GREEDY)


def compiled(model):
    """A wrapper as `torch.compile` makes it."""
    return torch._dynamo.eval_frame.OptimizedModule(model, lambda function: function)


@pytest.mark.parametrize("wrap", [torch.compile, compiled])
def test_a_compiled_model_is_decoded_as_the_model_inside(wrap):
    model = build("llama")
    generator = SpeculativeGenerator(wrap(model), ModelDrafter(wrap(perturbed(model)), 3))
    assert generator.target.model is model
    assert generator.generate(IDS, MASK, **GREEDY).sequences.equal(text_of(model))
    hooked = wrap(model).generate(IDS, attention_mask=MASK, custom_generate=generator, **GREEDY)
    assert hooked.equal(text_of(model))


def test_a_model_compiled_in_place_is_not_run_by_its_view():
    model = build("llama")
    expected, calls = text_of(model), []
    model._compiled_call_impl = lambda *args, **kwargs: calls.append(1)
    generator = SpeculativeGenerator(model, None)
    assert generator.generate(IDS, MASK, **GREEDY).sequences.equal(expected)
    assert not calls


def test_a_wrapper_of_several_devices_is_refused_with_the_line_that_works():
    model = build("llama")
    for make in (Target, ModelDrafter, lambda m: SpeculativeGenerator(m, None)):
        with pytest.raises(TypeError, match=r"got a DataParallel; pass model\.module"):
            make(nn.DataParallel(model))


class Config:
    """Of an adapter."""

    def __init__(self, *, is_prompt_learning):
        self.is_prompt_learning = is_prompt_learning


class WithAdapters(nn.Module):
    """What a `PeftModel` is to others."""

    def __init__(self, model, **adapter):
        super().__init__()
        self.inside, self.peft_config = model, {"default": Config(**adapter)}

    def get_base_model(self):
        """The model, with adapters in its layers."""
        return self.inside


def test_virtual_tokens_before_the_text_are_refused():
    wrapped = WithAdapters(build("llama"), is_prompt_learning=True)
    with pytest.raises(ValueError, match=r"'default' \(Config\) puts virtual tokens .*HF generate"):
        SpeculativeGenerator(wrapped, None)
    assert unwrap(WithAdapters(build("llama"), is_prompt_learning=False)).config.vocab_size == VOCAB


@pytest.fixture
def lora():
    """A model with trained LoRA adapters in its layers, by PEFT itself."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_alpha=32)
    model = peft.get_peft_model(build("llama"), config).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.2, generator=generator)
    return model


def test_adapters_in_the_layers_are_part_of_the_target(lora):
    expected = text_of(lora)
    with lora.disable_adapter():
        assert not text_of(lora).equal(expected)
    generator = SpeculativeGenerator(lora, ModelDrafter(lora, 3))
    result = generator.generate(IDS, MASK, **GREEDY)
    assert result.sequences.equal(expected)
    assert result.stats.acceptance_rate == 1
    hooked = lora.generate(
        input_ids=IDS, attention_mask=MASK, custom_generate=generator, pad_token_id=0, **GREEDY
    )
    assert hooked.equal(expected)
    assert generator.last_result.sequences is hooked


def test_adapters_that_are_switched_ask_for_a_new_generator(lora):
    generator = SpeculativeGenerator(lora, None)
    with (
        lora.disable_adapter(),
        pytest.raises(ValueError, match="adapters switched, scaled or merged"),
    ):
        generator.generate(IDS, MASK, **GREEDY)
    assert generator.generate(IDS, MASK, **GREEDY).sequences.equal(text_of(lora))
    lora.merge_adapter()
    with pytest.raises(ValueError, match="build the generator again"):
        generator.generate(IDS, MASK, **GREEDY)


def test_a_head_finds_the_model_inside(lora):
    from eagle_heads import head_for

    head = head_for(lora.get_base_model())
    assert EagleDrafter(head, torch.compile(lora)).num_draft_tokens == 4


def test_adapters_that_are_named_for_each_row_are_refused_before_anything_runs(lora):
    lora.add_adapter("second", lora.peft_config["default"])
    generator = SpeculativeGenerator(lora, None)
    options = {"input_ids": IDS, "attention_mask": MASK, "pad_token_id": 0, **GREEDY}
    names = ["default", "second", "default"][: len(IDS)]
    with pytest.raises(ValueError, match=r"adapter_names= .*row_inputs=.'adapter': adapter_names"):
        lora.generate(**options, adapter_names=names, custom_generate=generator)
    assert generator.last_result is None
