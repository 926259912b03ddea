"""Heads, configurations and readings that cannot be right are refused by name, before weights are
read or drafts made.
"""

from dataclasses import replace

import eagle_heads
import mask_heads
import mtp_heads
import pytest
from eagle_heads import stand_in

from specdec import EagleDrafter, MaskTokenDrafter, MTPDrafter
from specdec.heads.config import LayerConfig

DRAFTERS = {
    "EagleHead": (EagleDrafter, eagle_heads.random_drafter("eagle3")),
    "MaskTokenHead": (MaskTokenDrafter, mask_heads.random_drafter("p-eagle")),
    "MTPHead": (MTPDrafter, mtp_heads.random_drafter("chain")),
}
TARGETS = {name: stand_in(drafter.config) for name, (_, drafter) in DRAFTERS.items()}
PAIRS = [(own, other) for own in DRAFTERS for other in DRAFTERS if own != other]


@pytest.mark.parametrize(("own", "other"), PAIRS)
def test_a_head_of_another_design_is_refused_with_the_drafter_that_takes_it(own, other):
    drafter_class, head = DRAFTERS[own][0], DRAFTERS[other][1].head
    right = DRAFTERS[other][0].__name__
    message = f"{drafter_class.__name__} drafts with an instance of {own}, got {other}; pass it to "
    with pytest.raises(TypeError, match=rf"{message}{right}\(head, target\)"):
        drafter_class(head, TARGETS[other])


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_is_no_head(name):
    drafter_class, drafter = DRAFTERS[name]
    with pytest.raises(TypeError, match=rf"got the drafter {drafter_class.__name__}; pass its"):
        drafter_class(drafter, TARGETS[name])


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_head_without_weights_is_refused(name):
    drafter_class, drafter = DRAFTERS[name]
    ids = () if name == "MTPHead" else (drafter.head.target_ids,)
    head = type(drafter.head)(drafter.config, *ids).to("meta")
    with pytest.raises(ValueError, match=f"the {name} is on the meta device and has no weights"):
        drafter_class(head, TARGETS[name])


FIELDS = [
    ("EagleHead", "norm_before_residual", "false", "EagleConfig.norm_before_residual .*'false'"),
    ("EagleHead", "fc_norm", 0, "EagleConfig.fc_norm must be True or False, got 0"),
    ("EagleHead", "num_layers", 1.5, "EagleConfig.num_layers must be an integer, got 1.5"),
    ("EagleHead", "fusion", "output", "EagleConfig.fusion must be 'input' or 'attention', got 'o"),
    ("EagleHead", "vocab_size", "9", "EagleConfig.vocab_size must be an integer, got '9'"),
    ("MaskTokenHead", "is_causal", "no", "MaskTokenConfig.is_causal must be True or False"),
    ("MaskTokenHead", "alignment", "late", "MaskTokenConfig.alignment must be 'shifted', "),
    ("MTPHead", "hidden_first", "yes", "MTPConfig.hidden_first must be True or False, got 'yes'"),
    ("MTPHead", "semantics", "both", "MTPConfig.semantics must be 'chain' or 'target', got 'both'"),
    ("MTPHead", "num_layers", 2.5, "MTPConfig.num_layers must be an integer, got 2.5"),
]


@pytest.mark.parametrize(("head", "name", "value", "message"), FIELDS)
def test_a_field_of_another_type_is_refused_by_name(head, name, value, message):
    with pytest.raises((TypeError, ValueError), match=message):
        replace(DRAFTERS[head][1].config, **{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_bias": "false"}, "LayerConfig.attention_bias must be True or False"),
        ({"intermediate_size": 0}, "LayerConfig.intermediate_size must be an integer >= 1, got 0"),
        ({"rms_norm_eps": float("nan")}, "LayerConfig.rms_norm_eps must be a number >= 0, got nan"),
    ],
)
def test_a_layer_of_other_types_is_refused(options, message):
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_heads": 2, "num_kv_heads": 2}
    with pytest.raises((TypeError, ValueError), match=message):
        LayerConfig(**{"head_dim": 4} | sizes | options)


def test_an_activation_that_hf_does_not_have_is_refused():
    drafter = DRAFTERS["EagleHead"][1]
    layer = replace(drafter.config.layer, hidden_act="evil")
    with pytest.raises(ValueError, match="hidden_act must be one of HF's, got 'evil'"):
        type(drafter.head)(replace(drafter.config, layer=layer), drafter.head.target_ids)


READINGS = [
    (
        {"norm_before_residual": "false"},
        "norm_before_residual must be True, False or None, got 'false'",
    ),
    ({"feedback_norm": 1}, "feedback_norm must be True, False or None, got 1"),
    ({"feature_layers": 5}, "feature_layers must be .*got 5"),
    ({"rope_theta": "big"}, "rope_theta must be a number or None, got 'big'"),
    ({"rope_theta": float("inf")}, "rope_theta must be a number, got inf"),
    ({"ignore_tensors": 5}, "ignore_tensors must be .*got 5"),
    ({"ignore_tensors": "fc.bias"}, "ignore_tensors must be .*got 'fc.bias'"),
    ({"revision": 5}, "revision must be a string or None, got 5"),
    ({"allow_pickle": "no"}, "allow_pickle must be True or False, got 'no'"),
    ({"layer_convention": "layers"}, "must be 'boundary', 'layer_output' or None, got 'layers'"),
]


@pytest.mark.parametrize(("options", "message"), READINGS)
def test_an_option_of_a_reading_is_refused_by_name(options, message, tmp_path):
    drafter = DRAFTERS["EagleHead"][1]
    drafter.save_pretrained(tmp_path)
    with pytest.raises((TypeError, ValueError), match=message):
        EagleDrafter.from_pretrained(tmp_path, TARGETS["EagleHead"], **options)


@pytest.mark.parametrize("folder", ["", "a\0b", 5, None])
def test_a_head_is_saved_into_a_folder(folder):
    with pytest.raises((TypeError, ValueError), match="folder must be"):
        DRAFTERS["EagleHead"][1].save_pretrained(folder)


def test_a_head_is_not_saved_into_a_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ValueError, match=r"folder must be the path of a folder, but .* is a file"):
        DRAFTERS["EagleHead"][1].save_pretrained(file)
