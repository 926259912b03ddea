"""`UnoDrafter`: tokens of noise are read by PEFT's own layers, and no others are."""

import copy
import json
import sys

import pytest
import torch
from architectures import VOCAB, build
from drafter_table import MODEL, adapter, drive, make, own_target, written
from drafting import ragged_prompts
from refusals import refused
from safetensors.torch import load_file, save_file

from specdec import RejectionSampler, SpeculativeGenerator, Target, UnoDrafter, certify
from specdec.drafters.uno import noise_ids
from specdec.samplers import LogitsFilter

peft = pytest.importorskip("peft")
K, LIMIT = 5, 40
BATCH, MASK = ragged_prompts(VOCAB - 1, 9, 1, 7)
OPTIONS = {"max_new_tokens": 14, "eos_token_id": None, "pad_token_id": 0}


def gated(folder, **options):
    """An adapter of PEFT's, saved by PEFT, in a model that runs it from a token on; and a function
    of texts and that token.
    """
    torch.manual_seed(3)
    options = {"target_modules": "all-linear", "r": 4, "lora_alpha": 6} | options
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
    model, first = peft.get_peft_model(copy.deepcopy(MODEL), config).eval(), []
    model.save_pretrained(folder)

    def only_from_first(layer, args, out):
        is_noise = torch.arange(out.shape[1]) >= first[-1]
        return torch.where(is_noise[:, None], out, layer.base_layer(args[0]))

    for layer in model.modules():
        if hasattr(layer, "base_layer"):
            layer.register_forward_hook(only_from_first)

    def logits(text, start):
        first.append(start)
        return model(torch.tensor([text])).logits[0]

    return logits


@pytest.mark.parametrize(
    ("logits_filter", "options"),
    [
        ({"temperature": 0}, {}),
        ({"temperature": 0.7, "top_k": 12}, {"use_rslora": True}),
        ({}, {"target_modules": ["q_proj", "down_proj"], "r": 2}),
    ],
)
@torch.inference_mode()
def test_drafts_are_those_of_pefts_layers_on_noise_alone(logits_filter, options, tmp_path):
    reference, num_adapted = gated(tmp_path / "adapter", **options), 0
    drafter = UnoDrafter(own_target(), tmp_path, K, mask_token_id=LIMIT, subfolder="adapter")
    for loop, draft, _ in drive(drafter, 4, vocab_size=VOCAB, logits_filter=logits_filter):
        for row, text in enumerate(loop.rows):
            root, count = torch.tensor([[text[-1]]]), len(text)
            noise = noise_ids(root, torch.tensor([count - 1]), K - 1, LIMIT)[0].tolist()
            logits = reference(text + noise, count)[count - 1 :]
            expected = LogitsFilter(1, **logits_filter)(logits[None])[0]
            if draft.probs is None:
                assert draft.tokens[row].tolist() == logits.argmax(1).tolist()
            else:
                torch.testing.assert_close(draft.probs[row].float(), expected.float())
            plain = reference(text + noise, VOCAB)[count - 1 :]
            assert plain[0].equal(logits[0])
            num_adapted += int((plain[1:].argmax(1) != logits[1:].argmax(1)).sum())
    assert num_adapted > 5


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("tree", [None, "9x3"])
def test_greedy_text_is_that_of_hf(tree, graphs):
    drafter = UnoDrafter(MODEL, adapter(), K, mask_token_id=LIMIT, tree=tree)
    generator = SpeculativeGenerator(MODEL, drafter, graphs=graphs)
    result = generator.generate(BATCH, attention_mask=MASK, **OPTIONS)
    options = OPTIONS | {"do_sample": False}
    assert result.sequences.equal(MODEL.generate(BATCH, attention_mask=MASK, **options))
    assert result.stats.acceptance_length >= 14 / 8  # the first draft token is always right


def test_the_first_draft_token_is_a_draw_of_the_target():
    generator = SpeculativeGenerator(MODEL, make("uno"), RejectionSampler())
    options = OPTIONS | {"do_sample": True, "seed": 3}
    result = generator.generate(BATCH, attention_mask=MASK, **options)
    accepted = result.stats.joint_rates  # by position
    assert accepted[0] > 0.99
    assert accepted[1] < 0.9
    captured = SpeculativeGenerator(MODEL, make("uno"), RejectionSampler(), graphs=True)
    again = captured.generate(BATCH, attention_mask=MASK, **options)
    assert again.sequences.equal(result.sequences)


def test_the_model_stays_as_it_is():
    model = build("llama")
    before, modules = list(model.parameters()), list(model.modules())
    UnoDrafter(model, adapter(), K)
    assert all(a is b and a.requires_grad for a, b in zip(before, model.parameters(), strict=True))
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))


def test_noise_is_uniform_and_a_matter_of_the_text_alone():
    roots = torch.arange(VOCAB)[:, None]
    positions = torch.arange(VOCAB) * 3
    found = noise_ids(roots, positions, 90, LIMIT)
    assert found.min() == 1
    assert found.max() == LIMIT - 1
    counts = torch.bincount(found.flatten(), minlength=LIMIT)[1:].float()
    expected = counts.mean()
    assert (counts - expected).square().sum() / expected < 80  # chi-square of 38 degrees
    assert noise_ids(roots[7:8], positions[7:8], 90, LIMIT).equal(found[7:8])
    moved = noise_ids(roots, positions + 1, 89, LIMIT)
    assert (moved == found[:, :-1]).float().mean() < 0.1


@pytest.mark.swept
@pytest.mark.parametrize("name", ["uno", "uno, tree"])
def test_a_generator_with_it_is_certified(name):
    generator = SpeculativeGenerator(MODEL, make(name))
    assert certify(generator, [[5, 6, 7], [3]], max_new_tokens=12).passed


def changed(folder, keys=None, **tensors):
    """The adapter of the table, with other keys, and tensors that are functions of its own."""
    config = json.loads((adapter() / "adapter_config.json").read_text()) | (keys or {})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    stored = load_file(adapter() / "adapter_model.safetensors")
    for name, change in tensors.items():
        (key,) = (k for k in stored if k.endswith(f"layers.0.self_attn.q_proj.{name}.weight"))
        found = change(stored.pop(key))
        stored |= {key: found} if isinstance(found, torch.Tensor) else found
    save_file(stored, folder / "adapter_model.safetensors")
    return folder


REFUSED = {
    "not supported: peft_type PeftType.IA3": ({"peft_type": "IA3"}, {}),
    "bias 'all'; plain LoRA is read": ({"bias": "all"}, {}),
    "lacks 18 tensors .. lora_magnitude_vector": ({"use_dora": True}, {}),
    "and has 0 others: base_model": ({}, {"lora_B": lambda x: {}}),
    "lacks 1 tensors .. and has 1 others: .. lm_head.x": (
        {},
        {"lora_A": lambda x: {"lm_head.x": x}},
    ),
    "size mismatch": ({"r": 4}, {}),
    "NaN or infinity in base_model.model.model.layers.0": ({}, {"lora_A": lambda x: x / 0}),
    "Target modules {'nowhere'} not found": ({"target_modules": ["nowhere"]}, {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_other_adapters_are_refused_by_name(message, tmp_path):
    keys, tensors = REFUSED[message]
    with refused(message):
        UnoDrafter(own_target(), changed(tmp_path, keys, **tensors), K)


def test_other_targets_are_refused_by_name(tmp_path):
    with refused("Target modules .. not found in the base model"):
        UnoDrafter(build("gpt2"), adapter(), K)
    with refused("need layers that read each row by itself, and a Linear gets"):
        UnoDrafter(build("opt"), written(tmp_path, build("opt"), "fc1"), K)
    with refused("mask_token_id must be an integer .. got 1"):
        UnoDrafter(own_target(), adapter(), K, mask_token_id=1)
    config = peft.LoraConfig(target_modules=["q_proj"], use_dora=True, init_lora_weights=False)
    dora = peft.get_peft_model(build("llama"), config)
    dora.save_pretrained(tmp_path / "dora")
    with refused("an adapter that drafts is plain LoRA, and .. q_proj is a DoraLinearVariant"):
        UnoDrafter(own_target(), tmp_path / "dora", K)
    with refused("a target without adapters; merge them"):
        UnoDrafter(dora, adapter(), K)
    drafter = UnoDrafter(Target(MODEL), adapter(), K)
    with refused("drafts with the target that it was made with"):
        SpeculativeGenerator(copy.deepcopy(MODEL), drafter)


def test_without_peft_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match="pip install peft"):
        UnoDrafter(own_target(), "adapter", K)
