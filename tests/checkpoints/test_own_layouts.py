"""Records of one's own, of producers that do not exist: found, read and written without an edit of
the package. One stores fused products, one has a vocabulary map under names of its own.
"""

import json
import sys
from dataclasses import replace

import pytest
import torch
from checkpoint_files import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, TARGET
from checkpoint_layouts import safeailab_eagle3
from eagle_heads import head_for
from mask_heads import head_for as mask_head_for
from mtp_checkpoints import random_model
from refusals import refused
from safetensors.torch import load_file

from specdec import EagleDrafter, MaskTokenDrafter, MTPDrafter
from specdec.checkpoints import Key, Layout, file_parts, load, survey_checkpoint
from specdec.checkpoints.eagle import EAGLE
from specdec.checkpoints.eagle_layouts import VLLM
from specdec.checkpoints.families import RECOGNISED
from specdec.checkpoints.mask_layouts import DFLASH
from specdec.checkpoints.mask_token import MASK_TOKEN
from specdec.checkpoints.mtp_layouts import DEEPSEEK
from specdec.checkpoints.tensor_rules import Joined, Named, Shaped, Stacked, attention_rows
from specdec.drafters import EagleConfig
from specdec.lab.cli import main
from specdec.lab.training.mtp import new_head
from specdec.loading import load_drafter

QKV = ("q_proj.", "k_proj.", "v_proj.")
FUSED = Layout(
    producer="Fused",
    kind="EAGLE-3",
    config=VLLM.config,
    mark=lambda clues: clues.key("fused.version"),
    fields=VLLM.fields
    | {
        "norm_before_residual": Key("residual_is_normed", True),
        "layer.attention_bias": Key("has_bias", False),
    },
    ids={"fused.layers": ("layer_output", 0)},
    tensors=(
        Named({"blocks.{depth}.": "layers.{depth}.", "join.": "fc."}),
        Joined("qkv_proj.", QKV, rows=attention_rows),
        Joined("gate_up_proj.", ("gate_proj.", "up_proj.")),
    ),
    name="fused",
    file=(
        *(file_parts.model("FusedDraft", "llama"), ("fused.version", 1)),
        *("draft_vocab_size", "target_hidden_size", "fused.layers", "norm_before_residual"),
        "layer.attention_bias",
    ),
    copies=("lm_head",),
)
REDUCED = Layout(
    producer="Reduced",
    kind="DFlash",
    config=DFLASH.config,
    mark=lambda clues: clues.architecture("ReducedBlocks"),
    fields=DFLASH.fields
    | {
        "draft_vocab_size": Key("num_kept_ids", int),
        "mask_token_id": Key("noise_id", int, low=0),
        "block_size": Key("rows", int),
        "feature_layers": lambda r: r.hidden_states(r.layer_ids(), r.num_target_layers),
    },
    ids={"reads": ("hidden_state", 0)},
    tensors=(Named({"kept.offsets": "d2t", "kept.mask": "t2d", "kept.head.": "lm_head."}),),
    name="reduced",
    file=(
        *(file_parts.model("ReducedBlocks", "qwen3"), "draft_vocab_size", "mask_token_id"),
        *("block_size", "reads"),
    ),
)


def fused_drafter(**flags):
    flags = {
        "feature_layers": (2, 4, 7),
        "norm_before_residual": True,
        "head_dim": HEAD_DIM,
    } | flags
    return EagleDrafter(head_for(TARGET, **flags), TARGET, 3)


def reduced_drafter():
    flags = {"draft_vocab_size": 20, "has_lm_head": True, "feature_layers": (2, 5)}
    head = mask_head_for(TARGET, "dflash", **flags)
    head.target_ids.copy_(head.target_ids.sort().values)
    return MaskTokenDrafter(head, TARGET, 3)


def assert_same(found, drafter):
    assert found.config == drafter.config
    ours, theirs = drafter.head, found.head
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    assert all(x.equal(theirs.state_dict()[name]) for name, x in ours.state_dict().items())
    assert (ours.target_ids is None) == (theirs.target_ids is None)
    assert ours.target_ids is None or theirs.target_ids.equal(ours.target_ids)


@pytest.mark.parametrize("flags", [{}, {"num_layers": 2}, {"attention_bias": True}])
def test_fused_products_are_stored_as_one_and_read_as_several(flags, tmp_path):
    drafter = fused_drafter(**flags)
    drafter.save_pretrained(tmp_path, FUSED)
    held, ours = load_file(tmp_path / "model.safetensors"), drafter.head.state_dict()
    wide = "layers.0.self_attn."
    whole = torch.cat([ours[f"{wide}{name}weight"] for name in QKV])
    assert whole.shape[0] == (HEADS + 2 * KV_HEADS) * HEAD_DIM
    assert held["blocks.0.self_attn.qkv_proj.weight"].equal(whole)
    parts = [ours[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert held["blocks.0.mlp.gate_up_proj.weight"].equal(torch.cat(parts))
    assert not [name for name in held if "q_proj" in name or "up_proj" in name.split(".")]
    assert held["join.weight"].equal(ours["fc.weight"])
    assert ("blocks.0.self_attn.qkv_proj.bias" in held) == ("attention_bias" in flags)
    keys = json.loads((tmp_path / "config.json").read_text())
    assert keys["fused"] == {"version": 1, "layers": [1, 3, 6]}
    found = EagleDrafter.from_pretrained(tmp_path, TARGET, 3, layouts=(FUSED,))
    assert_same(found, drafter)
    for tensor in found.head.state_dict().values():  # no part keeps the whole in memory
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_vocabulary_map_may_have_other_names(tmp_path):
    drafter = reduced_drafter()
    drafter.save_pretrained(tmp_path, REDUCED)
    held, ids = load_file(tmp_path / "model.safetensors"), drafter.head.target_ids
    assert {"kept.offsets", "kept.mask", "kept.head.weight"} <= held.keys()
    assert not {"d2t", "t2d", "lm_head.weight"} & held.keys()
    assert (torch.arange(20) + held["kept.offsets"]).equal(ids)
    assert held["kept.mask"].nonzero()[:, 0].equal(ids)
    found = MaskTokenDrafter.from_pretrained(tmp_path, TARGET, 3, layouts=(REDUCED,))
    assert_same(found, drafter)


MINE = {
    "fused": (FUSED, fused_drafter, "eagle"),
    "reduced": (REDUCED, reduced_drafter, "mask-token"),
}


@pytest.mark.parametrize("name", MINE)
def test_a_record_is_found_wherever_heads_are_read(name, tmp_path, monkeypatch, capsys):
    layout, make, kind = MINE[name]
    drafter, folder = make(), tmp_path / "head"
    drafter.save_pretrained(folder, layout)
    others = tuple(each for each, _, _ in MINE.values())
    survey = survey_checkpoint(folder, TARGET, families=RECOGNISED, layouts=others)
    assert (survey.source.layout, survey.faults) == (layout, ())
    assert survey.unread_keys == ()
    assert_same(load(folder, TARGET, 3, layouts=others), drafter)
    for found in (f"{kind}:{folder}", str(folder)):
        assert_same(load_drafter(found, TARGET, 3, layouts=(layout,)), drafter)
    (tmp_path / "mine.py").write_text(f"from test_own_layouts import {name.upper()} as RECORD")
    assert_same(load_drafter(f"{tmp_path}/mine.py:RECORD:{folder}", TARGET, 3), drafter)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert_same(load_drafter("mine:RECORD:head", TARGET, 3), drafter)
    assert main(["inspect", "mine.py:RECORD:head"]) == 0
    shown = capsys.readouterr().out
    assert "specdec (its own word; read as mine.py:RECORD)" in shown
    with pytest.raises(ValueError, match=str(folder)):  # without the record
        load(folder, TARGET, 3)


DEEP = Layout(
    producer="Deep",
    kind="MTP",
    config=DEEPSEEK.config,
    mark=lambda clues: clues.tensor(r"draft\.0\.join\.weight"),
    fields=DEEPSEEK.fields | {"hidden_first": True, "zero_first_embedding": True},
    tensors=(
        Named(
            {
                "draft.{depth}.join.": "layers.{depth}.eh_proj.",
                "draft.{depth}.norms.0.": "layers.{depth}.enorm.",
                "draft.{depth}.norms.1.": "layers.{depth}.hnorm.",
                "draft.{depth}.norms.2.": "layers.{depth}.norm.",
                "draft.{depth}.": "layers.{depth}.block.layer.",
            },
            is_all=True,
        ),
        Joined("qkv_proj.", QKV, rows=attention_rows),
        Joined("gate_up_proj.", ("gate_proj.", "up_proj.")),
    ),
    refuse=DEEPSEEK.refuse,
    name="Deep",
)


def test_prediction_modules_have_records_too(tmp_path):
    target = random_model("Llama")
    head = new_head(target, 2, layout=DEEP)
    generator = torch.Generator().manual_seed(1)
    for tensor in head.parameters():
        tensor.data.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    drafter = MTPDrafter(head, target, 2)
    for _ in range(2):  # its own file is replaced
        drafter.save_pretrained(tmp_path, DEEP, target)
    held = load_file(tmp_path / "model.safetensors")
    parts = [head.state_dict()[f"layers.1.block.layer.self_attn.{n}weight"] for n in QKV]
    assert held["draft.1.self_attn.qkv_proj.weight"].equal(torch.cat(parts))
    for found in (
        MTPDrafter.from_pretrained(tmp_path, target, 2, layouts=(DEEP,)),
        load_drafter(f"mtp:{tmp_path}", target, 2, layouts=(DEEP,)),
    ):
        assert found.config.hidden_first
        assert found.config.num_layers == 2
        assert found.head.state_dict().keys() == head.state_dict().keys()
        assert all(x.equal(found.head.state_dict()[n]) for n, x in head.state_dict().items())
    with pytest.raises(ValueError, match="look like a head of none"):
        MTPDrafter.from_pretrained(tmp_path, target, 2)
    chained = new_head(target, 2, layout="DeepSeek")
    with refused("modules in Deep's layout cannot have hidden_first=False, zero_first_emb"):
        MTPDrafter(chained, target, 2).save_pretrained(tmp_path / "other", DEEP, target)


def test_sizes_may_stand_under_other_keys(tmp_path):
    keys = {"hidden_size": "d_model", "num_heads": "n_heads", "num_kv_heads": "n_kv_heads"}
    keys |= {"head_dim": "d_head", "intermediate_size": "d_ff"}
    named = {f"layer.{name}": Key(key, int) for name, key in keys.items()}
    sizes = (*named, "num_layers", "vocab_size", "draft_vocab_size")
    file = (("fused.version", 1), *sizes, *FUSED.file[3:])
    layers = {"num_layers": Key("depth", int), "target_hidden_size": Key("d_target", int)}
    layout = replace(FUSED, fields=FUSED.fields | named | layers, file=file)
    drafter = fused_drafter()
    drafter.save_pretrained(tmp_path, layout)
    held = json.loads((tmp_path / "config.json").read_text())
    assert (held["d_model"], held["n_heads"], held["n_kv_heads"]) == (HIDDEN, HEADS, KV_HEADS)
    assert not {"hidden_size", "num_attention_heads", "head_dim"} & held.keys()
    assert_same(EagleDrafter.from_pretrained(tmp_path, TARGET, 3, layouts=(layout,)), drafter)


def test_own_records_come_first_and_leave_other_files_alone(tmp_path):
    folder = safeailab_eagle3().write(tmp_path)
    greedy = Layout("Mine", "EAGLE-3", VLLM.config, lambda clues: "asked for", VLLM.fields)
    for layouts, producer in (((), "SafeAILab"), ((FUSED,), "SafeAILab"), ((greedy,), "Mine")):
        survey = survey_checkpoint(folder, TARGET, families=(EAGLE,), layouts=layouts)
        assert survey.source.producer == producer


def test_what_is_no_record_or_of_another_family_is_refused(tmp_path):
    folder = tmp_path / "head"
    fused_drafter().save_pretrained(folder, FUSED)
    for layouts in (FUSED, "fused", [FUSED, 3]):
        with pytest.raises(TypeError, match=r"layouts must be .*specdec\.checkpoints\.Layout"):
            load(folder, TARGET, layouts=layouts)
    message = "describes a EagleConfig, which heads of mask token do not have"
    with refused(message):
        survey_checkpoint(folder, TARGET, families=(MASK_TOKEN,), layouts=(FUSED,))
    (tmp_path / "mine.py").write_text("RECORD = 5")
    with refused("mine.py:RECORD must be a specdec.checkpoints.Layout or Family, by which"):
        load_drafter(f"{tmp_path}/mine.py:RECORD:x", TARGET)
    for name in ("lookup", "self:8", "zoo:eagle3", f"{tmp_path}/mine.py:RECORD"):
        with refused("layouts belongs to a head's files, not to"):
            load_drafter(name, TARGET, layouts=(FUSED,))


def test_a_whole_of_other_parts_is_refused(tmp_path):
    fused_drafter().save_pretrained(tmp_path, FUSED)
    path = tmp_path / "config.json"
    keys = json.loads(path.read_text()) | {"num_key_value_heads": HEADS}
    path.write_text(json.dumps(keys))
    with refused("qkv_proj.weight [64, 64] joins q_proj., k_proj., v_proj. of [32, 32, 32] rows"):
        load(tmp_path, TARGET, layouts=(FUSED,))


def test_a_record_that_loses_a_tensor_writes_nothing(tmp_path):
    two = {"x.": "layers.0.hidden_norm.", "y.": "norm."}, {"x.": "layers.0.input_layernorm."}
    wrong = replace(FUSED, tensors=(*FUSED.tensors, *map(Named, two)))
    with refused("fused layout cannot express tensors layers.0."):
        fused_drafter().save_pretrained(tmp_path / "head", wrong)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("entry", ["fusion", "has_fc", "nothing"])
def test_what_is_no_key_cannot_be_written(entry, tmp_path):
    wrong = replace(FUSED, file=(*FUSED.file, entry))
    with refused(f"the layout of Fused writes '{entry}', which must be a Key of its fields, one"):
        fused_drafter().save_pretrained(tmp_path / "head", wrong)
    assert not list(tmp_path.iterdir())


def test_a_head_of_another_class_needs_a_record(tmp_path):
    class OtherConfig(EagleConfig):
        pass

    drafter = fused_drafter()
    drafter.head.config = OtherConfig(**vars(drafter.config))
    with refused("no layout of OtherConfig heads is known; pass a specdec.checkpoints.Layout"):
        drafter.save_pretrained(tmp_path / "head")


def test_fields_that_read_each_other_are_refused_by_name(tmp_path):
    folder = safeailab_eagle3().write(tmp_path)
    wrong = {"has_fc": lambda r: r["fc_norm"], "fc_norm": lambda r: r["has_fc"]}
    layout = Layout("Mine", "EAGLE-3", VLLM.config, lambda clues: "x", VLLM.fields | wrong)
    with refused("the layout of Mine reads in a circle: has_fc -> fc_norm -> has_fc"):
        survey_checkpoint(folder, TARGET, families=(EAGLE,), layouts=(layout,))


def test_fields_may_look_at_each_other_in_any_order(tmp_path):
    folder = safeailab_eagle3().write(tmp_path)
    backwards = dict(reversed(VLLM.fields.items()))
    found = [
        survey_checkpoint(
            folder,
            TARGET,
            families=(EAGLE,),
            layouts=(Layout("Mine", "EAGLE-3", VLLM.config, lambda clues: "x", fields),),
        ).config
        for fields in (VLLM.fields, backwards)
    ]
    assert found[0] == found[1]


def test_tensors_of_several_numbers_are_stacked_and_taken_apart():
    """Two numbers with two parts each, of [3, 4]."""
    from specdec.checkpoints.config_fields import ConfigFields
    from specdec.checkpoints.files import as_stored
    from specdec.checkpoints.layout import Reading

    rule = Stacked(("experts.{depth}.gate.", "experts.{depth}.up."), "experts.both.")
    reading = Reading(VLLM, ConfigFields({}, "config.json"), {})
    names = [f"x.experts.{i}.{part}.weight" for i in range(2) for part in ("gate", "up")]
    held = {name: torch.randn(3, 4) for name in names}
    stored = {name: as_stored(name, x) for name, x in held.items()}
    (found,) = (result := rule.read(stored, reading)).values()
    assert [*result] == ["x.experts.both.weight"]
    assert found.shape == (2, 6, 4)
    assert found.read()[1].equal(torch.cat([held[names[2]], held[names[3]]]))
    again = rule.write({"x.experts.both.weight": found.read()}, reading)
    assert again.keys() == held.keys()
    assert all(x.equal(held[name]) for name, x in again.items())
    del stored[names[1]]  # incomplete: left as it is
    assert rule.read(stored, reading) == stored
    shaped = Shaped("mask", 3).read({"mask": as_stored("mask", torch.ones(5))}, reading)
    assert shaped["mask"].read().shape == shaped["mask"].shape == (1, 1, 5)


def test_a_record_of_a_configuration_of_one_s_own_is_told_what_it_lacks(tmp_path):
    class OwnConfig(EagleConfig):
        """Of a user's, which no layout of the package writes."""

    drafter = fused_drafter()
    drafter.head.config = OwnConfig(**vars(drafter.config))
    file = tuple(key for key in FUSED.file if key != "fused.layers")
    with refused("fused layout cannot express feature_layers .. ; mend the record"):
        drafter.save_pretrained(tmp_path, replace(FUSED, config=OwnConfig, file=file))
    assert not any(tmp_path.iterdir())
