"""PEFT's Activated LoRA begins where a prompt has its invocation tokens: text is that of the
`PeftModel`'s own `generate`, by every drafter and route.
"""

from types import SimpleNamespace

import pytest
import torch
from architectures import build

from specdec import ModelDrafter, SpeculativeGenerator, Target, certify
from specdec.lab.certificates.generator.reading import RowText, witness_of
from specdec.lab.evaluation.hf_generate import HFGenerate
from specdec.lab.integrations.trl import speculate

peft = pytest.importorskip("peft")
PROMPTS = [[5, 7, 9, 11, 12], [3, 4, 5, 6, 8, 10, 20, 7, 9], [5, 6, 8], [7, 9, 1, 2, 7, 9, 4]]
WIDTH = max(map(len, PROMPTS))
IDS = torch.tensor([[0] * (WIDTH - len(row)) + row for row in PROMPTS])
MASK = torch.tensor([[0] * (WIDTH - len(row)) + [1] * len(row) for row in PROMPTS])
IS_INVOKED = [True, True, False, True]
GREEDY = {"max_new_tokens": 10, "do_sample": False}


def config(**options):
    return peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=4, lora_alpha=32, **options
    )


def train(wrapped):
    generator = torch.Generator().manual_seed(0)
    for name, weight in wrapped.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, 0.2, generator=generator)
    return wrapped.eval()


@pytest.fixture
def wrapped():
    model = peft.get_peft_model(build("llama"), config(alora_invocation_tokens=[7, 9]))
    return train(model)


def text_of(model, **options):
    return model.generate(input_ids=IDS, attention_mask=MASK, pad_token_id=0, **GREEDY, **options)


def check_equal(wrapped, generator, **options):
    expected = text_of(wrapped, **options)
    own = {"row_inputs": options} if options else {}
    assert generator.generate(IDS, MASK, **GREEDY, **own).sequences.equal(expected)
    assert text_of(wrapped, custom_generate=generator, **options).equal(expected)
    return expected


def is_adapted(text):
    return text.ne(text_of(build("llama"))).any(dim=1).tolist()


@pytest.mark.parametrize("drafter", [None, "lookup", "suffix", "self:8"])
def test_text_is_adapted_from_the_invocation_of_its_row_on(wrapped, drafter):
    text = check_equal(wrapped, SpeculativeGenerator(wrapped, drafter))
    assert is_adapted(text) == IS_INVOKED


def test_text_does_not_depend_on_chunks_padding_or_a_compiler_around_it(wrapped):
    expected = check_equal(wrapped, SpeculativeGenerator(wrapped, None, prefill_chunk_size=2))
    compiled = torch.compile(wrapped, backend="eager")
    generator = SpeculativeGenerator(compiled, ModelDrafter(compiled, 2))
    check_equal(wrapped, generator)
    ends = [torch.tensor(row + [0] * (WIDTH - len(row))) for row in PROMPTS]
    result = generator.generate(torch.stack(ends), MASK.flip(1), **GREEDY)
    assert result.texts == expected[:, WIDTH:].tolist()


def test_a_draft_model_is_adapted_where_its_target_is(wrapped):
    generator = SpeculativeGenerator(wrapped, ModelDrafter(wrapped, 3))
    check_equal(wrapped, generator)
    assert generator.last_result.stats.acceptance_rate == 1
    plain = SpeculativeGenerator(wrapped, ModelDrafter(build("llama"), 3))
    check_equal(wrapped, plain)
    assert plain.last_result.stats.acceptance_rate < 1


def test_a_call_may_say_where_adapters_begin(wrapped):
    generator = SpeculativeGenerator(wrapped, ModelDrafter(wrapped, 3))
    text = check_equal(wrapped, generator, alora_offsets=[3, 0, 2, 5])
    assert is_adapted(text)[:3] == [True, False, True]
    plain = SpeculativeGenerator(build("llama"), None)
    with pytest.raises(TypeError, match=r"nobody reads row_inputs\['alora_offsets'\]"):
        plain.generate(IDS, MASK, row_inputs={"alora_offsets": [3, 0, 2, 5]}, **GREEDY)


def test_of_the_base_model_the_hook_alone_is_adapted(wrapped):
    base = wrapped.get_base_model()
    generator = SpeculativeGenerator(base, None)
    assert not any(is_adapted(generator.generate(IDS, MASK, **GREEDY).sequences))
    assert text_of(wrapped, custom_generate=generator).equal(text_of(wrapped))


def test_a_model_that_changed_is_tried_again_inside_of_the_hook(wrapped):
    generator = SpeculativeGenerator(wrapped, "lookup")
    check_equal(wrapped, generator)
    tried = generator.target.route
    layer = wrapped.get_base_model().model.layers[1]
    layer.register_forward_hook(lambda module, args, out: 1.5 * out)
    assert text_of(wrapped, custom_generate=generator).equal(text_of(wrapped))
    assert generator.target.route is not tried


def test_adapters_that_are_switched_begin_where_theirs_are_invoked(wrapped):
    wrapped.add_adapter("plain", config())
    wrapped.add_adapter("other", config(alora_invocation_tokens=[8]))
    train(wrapped)
    generator = SpeculativeGenerator(wrapped, ModelDrafter(wrapped, 3))
    where = {"other": [False, True, True, False], "plain": [True] * 4, "default": IS_INVOKED}
    for name, adapted in where.items():
        wrapped.set_adapter(name)
        with pytest.raises(ValueError, match="adapters switched, scaled or merged"):
            generator.generate(IDS, MASK, **GREEDY)
        generator.refresh()
        assert is_adapted(check_equal(wrapped, generator)) == adapted
        assert generator.last_result.stats.acceptance_rate == 1
    with pytest.raises(ValueError, match=r"q_proj is a ALoraLinearVariant; generate with one"):
        generator.generate(IDS, MASK, row_inputs={"adapter": ["plain"] * 4}, **GREEDY)


def test_rollouts_of_a_policy_are_adapted(wrapped):
    expected = text_of(wrapped)
    trainer = SimpleNamespace(model=wrapped, use_vllm=False)
    generator = speculate(trainer, "lookup")
    wrapped.train()
    assert text_of(wrapped).equal(expected)
    assert sum(generator.last_result.stats.steps) > 0
    assert wrapped.training


def test_the_witness_of_certificates_is_adapted(wrapped):
    generator, prompt = SpeculativeGenerator(wrapped, ModelDrafter(wrapped, 2)), PROMPTS[1]
    options = {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0}
    out = wrapped.generate(input_ids=torch.tensor([prompt]), **options, **GREEDY)
    expected, ids = torch.cat(out.logits), out.sequences[0].tolist()
    witness, text = witness_of(generator), RowText(ids, len(prompt), activated=2)
    torch.testing.assert_close(witness.logits(text), expected)
    torch.testing.assert_close(witness.in_pieces(text), expected)
    assert (witness.logits(RowText(ids, len(prompt))) - expected).abs().max() > 0.1
    report = certify(generator, PROMPTS[:2], max_new_tokens=8, num_samples=16, audit_tokens=8)
    assert report.passed, report


def test_what_runs_the_model_inside_is_refused(wrapped):
    with pytest.raises(ValueError, match="HFGenerate runs the model inside of its wrapper"):
        HFGenerate(Target(wrapped))


def test_an_adapter_that_a_view_would_lose_is_seen_in_the_self_test(wrapped, monkeypatch):
    from specdec.targets.edits import adapters

    monkeypatch.setattr(adapters.Adapted, "forward", lambda *_, result, **__: result)
    with pytest.raises(
        ValueError, match=r"\(LoraConfig\) .* \(where Activated LoRA begins, logits"
    ):
        SpeculativeGenerator(wrapped, None)
