"""Keys of config.json that nothing reads: refused wherever they stand, unless they say nothing."""

import json
from functools import partial

import pytest
from checkpoint_files import HEAD_DIM, TARGET, read, refuses, survey
from checkpoint_layouts import (
    EAGLE_LAYOUTS,
    IDS,
    MASK,
    MASK_LAYOUTS,
    angelslim,
    nvidia,
    safeailab_eagle3,
    specforge,
    specforge_peagle,
    speculators,
    speculators_dflash,
    vllm,
    z_lab,
)

from specdec.checkpoints import load
from specdec.lab.cli import main

LAYOUTS = EAGLE_LAYOUTS | {write.__name__: write for write in MASK_LAYOUTS}
LAYOUTS |= {"specforge_peagle": partial(specforge_peagle, mask_token_id=MASK)}
UNKNOWN = {
    **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "clip_qkv": 8.0},
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1},
    **{"no_rope_layers": [1, 0], "attn_output_gate": True, "norm_eps": 1e-3, "logits_scaling": 8},
    **{"log_snr_conditioning": True, "use_input_layernorm": False, "qk_norm": False, "gate": 0},
    **{"norm_type": "layer", "use_rotary_pos_emb": False, "use_cla": True, "use_mrope": True},
    **{"attention_multipliers": 1.0, "kv_lora_rank": 16, "hidden_scale": "half"},
    **{"rope_theta_2": 1e6, "num_experts": 4, "adapter": {"rank": 4}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_refuses_keys_of_unknown_names(layout, tmp_path):
    found = survey(LAYOUTS[layout](**UNKNOWN).write(tmp_path))
    flat = {"adapter.rank" if key == "adapter" else key for key in UNKNOWN}
    assert set(found.unread_keys) == flat
    assert all(key in found.faults[0] for key in flat)
    with pytest.raises(ValueError, match=r"not supported: keys of .* that nothing reads"):
        found.load(TARGET)


SECTIONS = {
    "eagle_config.new_norm": nvidia(eagle={"new_norm": True}),
    f"eagle_config.{IDS}_2": specforge(eagle_config={f"{IDS}_2": [1, 2, 3]}),
    "dflash_config.new_norm": z_lab(dflash={"new_norm": False}),
    "dflash_config.new.norm": z_lab(dflash={"new": {"norm": 1}}),
    "rope_scaling.new_factor": vllm(
        rope_scaling={"type": "linear", "factor": 2.0, "new_factor": 2}
    ),
    "rope_scaling.alpha": vllm(rope_scaling={"type": "dynamic", "factor": 1.0, "alpha": 1000.0}),
    "rope_parameters.new_factor": nvidia(
        rope_scaling=None, rope_parameters={"rope_type": "default", "new_factor": 2}
    ),
    "rope_scaling.factor": vllm(
        rope_scaling={"type": "linear", "factor": 2.0},
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "new_norm": speculators(layers={"new_norm": True}),
    "clip_qkv": speculators_dflash(layers={"clip_qkv": 3.0}),
    "text_config.hidden_size": vllm(text_config={"hidden_size": 64}),
}


@pytest.mark.parametrize("key", SECTIONS)
def test_keys_inside_of_sections_count_as_well(key, tmp_path):
    folder = SECTIONS[key].write(tmp_path)
    assert key in survey(folder).unread_keys
    refuses(folder, f"not supported .. {key} = ")


def test_a_value_that_another_place_of_a_speculators_file_hides_is_refused(tmp_path):
    files = speculators(mlp_bias=True, attention_bias=True)
    refuses(files.write(tmp_path), "other values at the top than transformer_layer_config")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_that_say_nothing_are_read(layout, tmp_path):
    """Null, what is empty, what every head does anyway, and what is of files, of training or of
    the target.
    """
    quiet = dict.fromkeys(UNKNOWN) | {
        **{"adapter": {}, "no_rope_layers": [], "mlp_bias": False, "use_cla": False},
        **{"norm_type": "rms", "use_rotary_pos_emb": True, "residual_multiplier": 1.0},
        **{"auto_map": {"AutoModel": "x.Y"}, "dtype": "bfloat16", "transformers_version": "9"},
        **{"_name_or_path": "x", "image_start_token_id": 3, "attention_dropout": 0.1},
        **{"initializer_range": 0.02, "id2label": {"0": "A"}, "top_k": 50, "is_decoder": True},
        **{"target_model_type": "qwen3", "router_aux_loss_coef": 0.1, "pretraining_tp": 2},
    }
    loud, plain = (LAYOUTS[layout](**keys) for keys in (quiet, {}))
    found = survey(loud.write(tmp_path / "loud"))
    assert found.unread_keys == ()
    assert found.config == survey(plain.write(tmp_path / "plain")).config


def test_keys_that_producers_copy_from_their_targets_are_read(tmp_path):
    """Those of Hunyuan in AngelSlim's configurations: its trainer's layers read none of them."""
    rope = {"type": "dynamic", "factor": 1.0, "alpha": 1000.0, "beta_fast": 32, "mscale": 1.0}
    keys = {
        **{"attention_head_dim": HEAD_DIM, "cla_share_factor": 2, "class_num": 0, "pad_id": 3},
        **{
            "add_classification_head": False,
            "dense_list": [32, 0],
            "im_end_id": 5,
            "im_start_id": 4,
        },
        **{"im_newline_id": 11, "mask_init_id": 12, "org_vocab_size": 61, "pool_type": "last"},
        **{"text_end_id": 7, "text_start_id": 6, "use_qk_norm": True, "rope_scaling": rope},
    }
    read(angelslim(**keys).write(tmp_path / "own"))
    refuses(
        angelslim(**keys | {"attention_head_dim": 99}).write(tmp_path / "w"), "attention_head_dim"
    )
    refuses(safeailab_eagle3(**keys).write(tmp_path / "others"), "nothing reads .. use_qk_norm")


def test_a_caller_can_say_that_keys_change_nothing(tmp_path, capsys):
    keys = {"new_flag": 1, "eagle_config.new_norm": True}
    folder = nvidia(eagle={"new_norm": True}, new_flag=1).write(tmp_path / "head")
    refuses(folder, "eagle_config.new_norm = True, new_flag = 1 .. pass ignore_keys=['eagle_")
    refuses(folder, "reads: new_flag = 1.", ignore_keys=["eagle_config"])
    drafter = load(folder, TARGET, 3, ignore_keys=list(keys))
    expected = read(nvidia().write(tmp_path / "plain"))
    assert drafter.config == expected.config
    assert main(["inspect", str(folder)]) == 2
    assert "new_flag = 1" in capsys.readouterr().out
    assert main(["inspect", str(folder), "--ignore-keys", ",".join(keys)]) == 0


def test_what_a_mark_of_another_family_looks_at_is_not_read_by_this_one(tmp_path):
    refuses(vllm(medusa_num_heads=3).write(tmp_path), "medusa_num_heads = 3")


def test_files_that_are_written_have_no_key_that_nothing_reads(tmp_path):
    folder = nvidia().write(tmp_path / "theirs")
    drafter = load(folder, TARGET, 3)
    for layout in ("safeailab", "speculators"):
        drafter.save_pretrained(tmp_path / layout, layout, verifier="somebody/target")
        assert json.loads((tmp_path / layout / "config.json").read_text())["producer"] == "specdec"
        assert survey(tmp_path / layout).unread_keys == ()
