"""Certificates read texts with what the call brought for each row: an offset, an adapter."""

import pytest
import torch
from architectures import build
from drafter_table import make

from specdec import SpeculativeGenerator, certify
from specdec.lab.certificates import CertificateError, Sentinel
from specdec.lab.certificates.generator.reading import witness_of
from specdec.lab.certificates.generator.witness import RowText

PROMPTS = [[7, 3, 9, 3, 9], [5, 2], [2, 40, 11]]
QUICK = {"num_samples": 8, "max_new_tokens": 12, "audit_tokens": 6}
OFFSETS = {"position_offset": [11, 0, 4]}


@pytest.mark.parametrize("values", [[11, 0, 4], torch.tensor([11, 0, 4])])
def test_a_model_with_absolute_positions_passes_at_an_offset(values):
    generator = SpeculativeGenerator(build("gpt2"), make("model"))
    settings = [{"row_inputs": {"position_offset": values}}]
    report = certify(generator, PROMPTS, settings=settings, **QUICK)
    assert report.passed, report
    assert report.text.loop_distance < 1e-5
    assert report.greedy.num_tokens == 3 * QUICK["audit_tokens"]


def rollout(generator, **options):
    """Prompts, texts and the options of a call."""
    ids = torch.tensor([PROMPTS[0]] * 3)
    options = {"temperature": 1.0, "neutral": True, **options}
    result = generator.generate(ids, max_new_tokens=16, seed=[1, 2, 3], **options)
    return result.prompts, result.texts, options


def test_a_sentinel_reads_offsets_and_sees_that_they_are_left_out():
    generator = SpeculativeGenerator(build("gpt2"), "lookup")
    prompts, texts, options = rollout(generator, row_inputs=OFFSETS)
    sentinel = Sentinel(generator, with_drafts=True)
    sentinel(prompts, texts, **options)
    assert sentinel.found.passed
    model, text = witness_of(generator), [*prompts[0], *texts[0]]
    here, moved = (model.logits(RowText(text, 5, offset)) for offset in (0, 11))
    assert (here - moved).abs().max() > 0.01


def adapted():
    """A model with two adapters that differ."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(
        target_modules=["q_proj", "down_proj"], r=4, lora_alpha=30, init_lora_weights=False
    )
    model = peft.get_peft_model(build("llama"), config, adapter_name="one")
    model.add_adapter("two", config)
    return model.eval()


def test_each_row_is_read_with_its_own_adapter():
    model = adapted()
    generator = SpeculativeGenerator(model, "lookup")
    settings = [{"row_inputs": {"adapter": ["two", "__base__", "one"]}}]
    report = certify(generator, PROMPTS, settings=settings, **QUICK)
    assert report.passed, report
    assert report.text.loop_distance < 1e-5
    names = {"adapter": ["one", "two", "__base__"]}
    prompts, texts, options = rollout(generator, row_inputs=names)
    sentinel = Sentinel(generator)
    sentinel(prompts, texts, **options)
    assert sentinel.found.passed
    witness, text = witness_of(generator), RowText([*prompts[0], *texts[0]], 5)
    two = witness.logits(RowText(text.ids, 5, adapter="two"))
    ids = torch.tensor([text.ids])
    with torch.no_grad():
        expected = model(input_ids=ids, adapter_names=["two"]).logits[0, 4:-1]
    assert torch.allclose(two, expected, atol=1e-5)
    assert not torch.allclose(two, witness.logits(text), atol=1e-2)  # "one" is active
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_reference_without_adapters_is_refused():
    generator = SpeculativeGenerator(adapted(), "lookup")
    sentinel = Sentinel(generator, reference=build("llama"))
    with pytest.raises(ValueError, match=r"'two'.*LlamaForCausalLM has no LoRA layers"):
        sentinel([[1]], [[2]], temperature=1.0, row_inputs={"adapter": ["two"]})


def test_a_wrong_offset_is_a_fault():
    """The negative control: absolute positions, read elsewhere."""
    generator = SpeculativeGenerator(build("gpt2"), "lookup")
    ids, options = torch.tensor([PROMPTS[0]] * 48), {"temperature": 1.0, "neutral": True}
    moved = {"row_inputs": {"position_offset": [20] * 48}}
    options |= {"max_new_tokens": 24, "output_scores": True, "seed": [*range(48)]}
    result = generator.generate(ids, **options, **moved)
    with pytest.raises(CertificateError):
        Sentinel(generator)(result.prompts, result.texts, scores=result.scores, temperature=1.0)
