"""Saved mask-token heads load back bit for bit, and what a layout cannot express is refused."""

import json
from dataclasses import replace

import pytest
import torch
from architectures import build
from mask_heads import WIRINGS, config_for, random_head
from mask_reference import draft_logits
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specdec import MaskTokenDrafter
from specdec.checkpoints.export import layouts_of
from specdec.heads.mask_token import ROWS

MODEL = build("llama")


def drafter_of(name, **flags):
    """A random head of a wiring for the model, in float32."""
    flags = {"feature_layers": (1, 2, 3)[: len(WIRINGS[name].feature_layers)]} | flags
    config = config_for(MODEL, name, **flags)
    if config.context == "none":
        layer = replace(config.layer, max_position_embeddings=64)
        config = replace(config, layer=layer, max_positions=64)
    return MaskTokenDrafter(random_head(config, dtype=torch.float32), MODEL, 2)


CASES = [
    ("p-eagle", "speculators", {}),
    ("p-eagle", "vllm", {}),
    ("p-eagle, one layer", "speculators", {"has_qk_norm": True}),
    ("p-eagle, norm before fc", "speculators", {}),
    ("p-eagle", "speculators", {"fc_norm": True, "feature_layers": (1, 3)}),
    ("p-eagle", "vllm", {"fc_norm": True, "feature_layers": (0, 1, 2, 3)}),
    ("p-eagle, norm before residual", "vllm", {}),
    ("p-eagle, fewer ids", "speculators", {}),
    ("p-eagle, fewer ids", "vllm", {}),
    ("p-eagle", "speculators", {"has_embed_tokens": True, "has_lm_head": False}),
    ("p-eagle", "vllm", {"has_embed_tokens": True, "has_lm_head": False}),
    ("p-eagle, wider target", "speculators", {"hidden_size": 16}),
    ("pard", "huggingface", {}),
    ("pard, tied", "huggingface", {}),
    ("pard", "huggingface", {"has_qk_norm": True}),
    ("pard", "huggingface", {"attention_bias": True}),
    ("pard", "huggingface", {"attention_bias": True, "attention_output_bias": True}),
    ("dflash", "z-lab", {}),
    ("dflash", "speculators", {}),
    ("dflash, own tables", "speculators", {}),
    ("dflash", "speculators", {"draft_vocab_size": 20, "has_lm_head": True}),
    ("dspark", "speculators", {}),
]


@pytest.mark.parametrize(("name", "layout", "flags"), CASES)
def test_a_saved_head_loads_back_bit_for_bit(name, layout, flags, tmp_path):
    drafter = drafter_of(name, **flags)
    drafter.save_pretrained(tmp_path, layout, verifier="somebody/target")
    loaded = MaskTokenDrafter.from_pretrained(tmp_path, MODEL, 2)
    ours, theirs = drafter.head, loaded.head
    ids = ours.target_ids
    if ids is not None:  # files hold draft ids in ascending order
        order = ids.argsort()
        assert theirs.target_ids.equal(ids[order])
        ours.lm_head.weight.data = ours.lm_head.weight.data[order]
    assert loaded.config == drafter.config
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    for key, tensor in ours.state_dict().items():
        assert theirs.state_dict()[key].equal(tensor), key


@pytest.mark.parametrize("alignment", ROWS)
def test_the_default_layout_is_that_of_the_alignment(alignment, tmp_path):
    name = {"shifted": "p-eagle", "unshifted": "pard", "same-position": "dflash"}.get(alignment)
    drafter = drafter_of(name or "dspark")
    drafter.save_pretrained(tmp_path / "usual", verifier="a/b")
    drafter.save_pretrained(tmp_path / "named", layouts_of(alignment)[0], verifier="a/b")
    for file in ("config.json", "model.safetensors"):
        usual, named = (tmp_path / folder / file for folder in ("usual", "named"))
        assert usual.read_bytes() == named.read_bytes()


def test_files_hold_what_their_readers_expect(tmp_path):
    drafter_of("p-eagle").save_pretrained(tmp_path / "a", "speculators", verifier="a/b")
    keys = json.loads((tmp_path / "a/config.json").read_text())
    assert keys["speculators_model_type"] == "peagle"
    assert keys["mask_token_id"] == 7
    assert keys["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    tensors = load_file(tmp_path / "a/model.safetensors")
    assert tensors["mask_hidden"].shape == (1, 1, 96)
    assert tensors["embed_tokens.weight"].equal(MODEL.get_input_embeddings().weight)
    drafter_of("dflash").save_pretrained(tmp_path / "b", "z-lab")
    keys = json.loads((tmp_path / "b/config.json").read_text())
    assert keys["dflash_config"] == {"target_layer_ids": [0, 1], "mask_token_id": 7}
    assert keys["block_size"] == 6
    assert "embed_tokens.weight" not in load_file(tmp_path / "b/model.safetensors")
    drafter_of("dflash").save_pretrained(tmp_path / "c", "speculators", verifier="a/b")
    keys = json.loads((tmp_path / "c/config.json").read_text())
    assert keys["aux_hidden_state_layer_ids"] == [1, 2]
    table = load_file(tmp_path / "c/model.safetensors")["embed_tokens.weight"]
    assert table.equal(MODEL.get_input_embeddings().weight)
    drafter_of("pard").save_pretrained(tmp_path / "d")
    keys = json.loads((tmp_path / "d/config.json").read_text())
    assert (keys["pard_token"], keys["spd_type"]) == (7, "pard")


@pytest.mark.parametrize("layout", ["speculators", "vllm"])
@pytest.mark.parametrize("layers", [(2,), (1, 2, 3), (0, 1, 2, 3)])
def test_vllm_learns_the_number_of_features_and_their_norms(layout, layers, tmp_path):
    """Its P-EAGLE head takes three features and no norms without these keys, and of a speculators
    file it keeps little more than `transformer_layer_config` (vLLM 0.32.0, `update_peagle`).
    """
    drafter = drafter_of("p-eagle", feature_layers=layers, fc_norm=True)
    drafter.save_pretrained(tmp_path, layout, verifier="a/b")
    keys = json.loads((tmp_path / "config.json").read_text())
    kept = keys if layout == "vllm" else keys["transformer_layer_config"]
    assert kept["num_aux_hidden_states"] == len(layers)
    assert kept["fc_norm"] is True


@pytest.mark.parametrize(("name", "kind"), [("dflash", "dflash"), ("dspark", "dspark")])
def test_vllm_runs_a_block_in_both_directions_and_in_its_own_alignment(name, kind, tmp_path):
    """`sliding_window_non_causal: false` makes every layer causal, and a file of kind `dflash` is
    run in the same position whatever `sample_from_anchor` says (vLLM 0.32.0, `update_dflash` and
    `v1/spec_decode/dflash.py`).
    """
    drafter_of(name).save_pretrained(tmp_path, "speculators", verifier="a/b")
    keys = json.loads((tmp_path / "config.json").read_text())
    assert keys["speculators_model_type"] == kind
    assert keys["sliding_window_non_causal"] is True
    assert keys["sample_from_anchor"] is (kind == "dspark")
    assert keys.get("markov_rank", 0) == 0
    # Six rows; vLLM's blocks have as many rows as draft tokens, and one more for `dflash`.
    tokens = keys["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    assert tokens == {"dflash": 5, "dspark": 6}[kind]


@pytest.mark.parametrize("flags", [{}, {"has_qk_norm": True}, {"attention_bias": True}])
@pytest.mark.parametrize("name", ["pard", "pard, tied"])
@torch.no_grad()
def test_a_saved_language_model_is_one_of_transformers(name, flags, tmp_path):
    drafter = drafter_of(name, **flags)
    drafter.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    text, mask = [5, 17, 3, 8, 21, 40], drafter.config.mask_token_id
    expected = model(input_ids=torch.tensor([[*text, mask, mask]])).logits[0, -3:]
    weights = drafter.head.state_dict()
    tables = [weights["embed_tokens.weight"], None]
    seen = draft_logits(drafter.config, weights, tables, text, None, 3)
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-4)


OBSTACLES = {
    "fc_bias": ("p-eagle, norm per feature", "speculators", {}),
    "output_norm=False": ("p-eagle, no output norm", "speculators", {}),
    "logit_scale": ("p-eagle", "vllm", {"logit_scale": 0.5}),
    "final features": ("p-eagle", "speculators", {"feature_layers": (1, 2, "final")}),
    "not in the order of layers": ("p-eagle", "speculators", {"feature_layers": (2, 1, 3)}),
    "has_qk_norm": ("p-eagle", "vllm", {"has_qk_norm": True}),
    "attention_bias=True": ("p-eagle", "vllm", {"attention_bias": True}),
    "biases of q, k, v alone": ("p-eagle", "speculators", {"attention_bias": True}),
    "a mask without an id": ("p-eagle, learned embedding", "speculators", {}),
    "a mask without": ("dflash, learned embedding", "z-lab", {}),
    "a mask without an": ("dflash, learned embedding", "speculators", {}),
    "layers without norms of queries and": ("dflash", "speculators", {"has_qk_norm": False}),
    "is_causal=True": ("dflash", "z-lab", {"is_causal": True}),
    "a head without block_size": ("dflash, causal", "z-lab", {}),
    "has_embed_tokens=True, has_lm_head=True": ("dflash, own tables", "z-lab", {}),
    "layers without norms of queries": ("dflash", "z-lab", {"has_qk_norm": False}),
    "features of the embeddings": ("dflash", "z-lab", {"feature_layers": (0, 2)}),
    "biases of q, k, v alone beside": ("pard, qk norm", "huggingface", {}),
    "fewer ids than the target has": ("pard", "huggingface", {"draft_vocab_size": 30}),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_a_layout_cannot_express_is_refused_and_nothing_is_written(obstacle, tmp_path):
    name, layout, flags = OBSTACLES[obstacle]
    drafter = drafter_of(name, **flags)
    with pytest.raises(ValueError, match=f"the {layout} layout cannot express .*{obstacle}"):
        drafter.save_pretrained(tmp_path / "head", layout)
    assert not (tmp_path / "head").exists()


def test_a_language_model_without_a_limit_and_unknown_layouts_are_refused(tmp_path):
    config = config_for(MODEL, "pard")
    drafter = MaskTokenDrafter(random_head(config, dtype=torch.float32), MODEL, 2)
    with pytest.raises(ValueError, match="cannot express max_positions other than max_pos"):
        drafter.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"'shifted' heads must be 'speculators' or 'vllm', got 'z-lab'"
    ):
        drafter_of("p-eagle").save_pretrained(tmp_path, "z-lab")
