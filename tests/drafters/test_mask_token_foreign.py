"""Mask-token drafters beside the code of others, on the same random weights.

DFlash: transformers' own candidate generator over a whole generation. PARD: a straight forward of
the Hugging Face model over [tokens, masks]. DFlash, its next-token form and its successors beside
the models of `speculators` and SpecForge: `foreign/test_block_heads.py`. P-EAGLE and DFlash files
are run by vLLM in `foreign/test_vllm.py`.
"""

import json

import pytest
import torch
import transformers
from architectures import VOCAB, build
from mask_heads import config_for, random_head
from transformers.generation import candidate_generator

from specdec import MaskTokenDrafter, SpeculativeGenerator

# DFlash, as transformers generates with it.

BLOCK, MASK_TOKEN, LAYER_IDS = 5, 7, [0, 1]


def dflash_assistant(model, *, block_size=BLOCK, layers=2, seed=0, window=None):
    """A random DFlash model of transformers, for a target of the given width; its first layer has a
    sliding window, if any is given.
    """
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config = MuseGlimmerAssistantConfig(
        hidden_size=model.config.hidden_size,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        layer_types=["sliding_attention" if window else "full_attention"]
        + ["full_attention"] * (layers - 1),
        sliding_window=window or 2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        block_size=block_size,
        mask_token_id=MASK_TOKEN,
        target_layer_ids=LAYER_IDS,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    assistant, generator = (
        MuseGlimmerAssistantModel(config),
        torch.Generator().manual_seed(seed),
    )
    with torch.no_grad():
        for parameter in assistant.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1
            parameter.copy_(1 + 0.3 * noise if is_norm else noise * parameter.shape[-1] ** -0.5)
    return assistant.eval()


def as_head(model, assistant, **changes):
    """Our head with the assistant's weights: the renaming is `encoder.*`."""
    shared = {
        "num_layers": assistant.config.num_hidden_layers,
        "feature_layers": tuple(i + 1 for i in LAYER_IDS),
        "block_size": assistant.config.block_size,
        # HF's masks in both directions are for distances up to and with sliding_window.
        "windows": (assistant.config.sliding_window + 1, None)
        if "sliding_attention" in assistant.config.layer_types
        else (),
        "is_window_causal": False,
    }
    config = config_for(model, "dflash", **(shared | changes))
    head = random_head(config, dtype=torch.float32)
    names = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
    weights = {}
    for name, tensor in assistant.state_dict().items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        weights[name] = tensor
    head.load_state_dict(weights, strict=True)
    return head


def proposals_of_hf(model, assistant, prompt, new_tokens, monkeypatch):
    """HF's text, and what its candidate generator proposed after which tokens."""
    seen = []
    generator = candidate_generator.DFlashTokenCandidateGenerator
    method = generator.get_candidates

    def recorded(self, input_ids, **kwargs):
        ids, logits = method(self, input_ids, **kwargs)
        if logits is not None:
            seen.append((input_ids[0].tolist(), ids[0, input_ids.shape[1] :].tolist()))
        return ids, logits

    monkeypatch.setattr(generator, "get_candidates", recorded)
    text = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=assistant,
        speculation_type="dflash",
        max_new_tokens=new_tokens,
        do_sample=False,
    )
    return text[0].tolist(), seen


def proposals_of_ours(model, drafter, text, length, new_tokens):
    """The same of ours, after the first `length` tokens of a text."""
    prompt = torch.tensor([text[:length]])
    options = {"max_new_tokens": new_tokens, "do_sample": False, "trace": True}
    result = SpeculativeGenerator(model, drafter).generate(prompt, **options)
    assert result.sequences[0].tolist() == text[: length + new_tokens]
    steps, seen = list(text[:length]), []
    for step in result.trace[0]:
        seen.append((list(steps), list(step.draft_tokens)))
        steps += step.new_tokens
    return seen


@pytest.mark.skipif(
    not hasattr(candidate_generator, "DFlashTokenCandidateGenerator"),
    reason="this transformers has no DFlash",
)
@pytest.mark.parametrize(
    ("name", "block_size", "window"),
    [
        ("llama", 2, None),
        ("llama", 9, None),
        ("llama", BLOCK, 6),
        ("qwen3", BLOCK, None),
        ("gpt_oss", BLOCK, None),
    ],
)
@torch.no_grad()
def test_dflash_proposes_what_transformers_proposes_over_a_whole_generation(
    name, block_size, window, monkeypatch
):
    model = build(name)
    assistant = dflash_assistant(model, block_size=block_size, seed=3, window=window)
    prompt = torch.tensor([[5, 17, 3, 8, 21, 40]])
    with monkeypatch.context() as patch:
        text, theirs = proposals_of_hf(model, assistant, prompt, 30, patch)
    assert len(theirs) > 5
    length = len(theirs[0][0])  # they read the prompt, and one token more, before they draft
    drafter = MaskTokenDrafter(as_head(model, assistant), model, block_size - 1)
    ours = proposals_of_ours(model, drafter, text, length, len(text) - length)
    for (seen, drafted), (other_seen, other_drafted) in zip(ours, theirs, strict=False):
        assert (seen, drafted) == (other_seen, other_drafted)
    assert abs(len(ours) - len(theirs)) <= 1  # HF stops drafting one token before the end

    # Fewer draft tokens are the first of the same block.
    if block_size > 2:
        fewer = MaskTokenDrafter(as_head(model, assistant), model, 1)
        for seen, drafted in proposals_of_ours(model, fewer, text, length, 12):
            for other_seen, other_drafted in theirs:
                assert seen != other_seen or drafted == other_drafted[:1]

    # The negative controls: a window one position off, features one layer off.
    if window:
        wrong = as_head(model, assistant, windows=(window, None))
        drafter = MaskTokenDrafter(wrong, model, block_size - 1)
        others = proposals_of_ours(model, drafter, text, length, len(text) - length)
        assert [drafted for _, drafted in others] != [drafted for _, drafted in ours]
    wrong = as_head(model, assistant, feature_layers=(0, 1))
    others = proposals_of_ours(
        model, MaskTokenDrafter(wrong, model, block_size - 1), text, length, len(text) - length
    )
    assert [drafted for _, drafted in others] != [drafted for _, drafted in ours]


# PARD: a plain language model.


def language_model(kind, *, vocab_size=VOCAB, tied=False, seed=2):
    """A small random model of another width than the targets."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocab_size,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model.eval()


def save_pard(model, folder):
    """As AMD stores one: the model, and two keys in its configuration."""
    model.save_pretrained(folder)
    keys = json.loads((folder / "config.json").read_text())
    keys |= {"pard_token": MASK_TOKEN, "spd_type": "pard"}
    (folder / "config.json").write_text(json.dumps(keys))


@pytest.mark.parametrize(
    ("kind", "vocab_size", "tied"),
    [("Llama", VOCAB, True), ("Qwen2", VOCAB + 3, False), ("Qwen3", VOCAB - 2, False)],
)
@torch.no_grad()
def test_pard_proposes_what_a_straight_forward_over_tokens_and_masks_does(
    kind, vocab_size, tied, tmp_path
):
    target = build("llama")
    model = language_model(kind, vocab_size=vocab_size, tied=tied)
    save_pard(model, tmp_path)
    drafter = MaskTokenDrafter.from_pretrained(tmp_path, target, 4)
    prompt = torch.tensor([[5, 17, 3, 8, 21, 40]])
    result = SpeculativeGenerator(target, drafter).generate(prompt, max_new_tokens=30, trace=True)
    text, seen = prompt[0].tolist(), []
    for step in result.trace[0]:
        ids = torch.tensor([[min(t, vocab_size - 1) for t in text] + [MASK_TOKEN] * 3])
        logits = model(input_ids=ids).logits[0, -4:, : min(VOCAB, vocab_size)]
        top = logits.topk(2).values
        assert float((top[:, 0] - top[:, 1]).min()) > 1e-4  # no ties for rounding to decide
        assert step.draft_tokens == logits.argmax(-1).tolist()
        seen.append(step.draft_tokens)
        text += step.new_tokens
    assert len(seen) > 5
