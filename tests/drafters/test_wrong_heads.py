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
from specdec.heads.layers import LayerConfig

DRAFTERS = {
    "EagleHead": (EagleDrafter, eagle_heads.random_drafter("eagle3")),
    "MaskTokenHead": (MaskTokenDrafter, mask_heads.random_drafter("p-eagle")),
    "MTPHead": (MTPDrafter, mtp_heads.random_drafter("chain")),
}
TARGETS = {name: stand_in(drafter.config) for name, (_, drafter) in DRAFTERS.items()}
PAIRS = [(own, other) for own in DRAFTERS for other in DRAFTERS if own != other]


@pytest.mark.parametrize(("own", "other"), PAIRS)
def test_a_head_of_another_design_is_refused_with_the_drafter_that_takes_it(own, other):
    right = DRAFTERS[other][0].__name__
    with pytest.raises(TypeError, match=f"{own}.*{other}.*{right}"):
        DRAFTERS[own][0](DRAFTERS[other][1].head, TARGETS[other])


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_and_a_head_without_weights_are_refused(name):
    drafter_class, drafter = DRAFTERS[name]
    with pytest.raises(TypeError, match=drafter_class.__name__):
        drafter_class(drafter, TARGETS[name])
    ids = () if name == "MTPHead" else (drafter.head.target_ids,)
    head = type(drafter.head)(drafter.config, *ids).to("meta")
    with pytest.raises(ValueError, match=f"{name}.*meta"):
        drafter_class(head, TARGETS[name])


FIELDS = [
    ("EagleHead", {"fusion": "output"}, "fusion"),
    ("EagleHead", {"num_layers": 1.5}, "num_layers"),
    ("MaskTokenHead", {"alignment": "late"}, "alignment"),
    ("MaskTokenHead", {"block_size": "x"}, "block_size"),
    ("MTPHead", {"semantics": "both"}, "semantics"),
    ("MTPHead", {"num_layers": 2.5}, "num_layers"),
]


@pytest.mark.parametrize(("head", "field", "name"), FIELDS)
def test_a_field_of_another_type_is_refused_by_name(head, field, name):
    with pytest.raises((TypeError, ValueError), match=name):
        replace(DRAFTERS[head][1].config, **field)


def test_an_activation_that_hf_does_not_have_and_an_empty_layer_are_refused():
    drafter = DRAFTERS["EagleHead"][1]
    layer = replace(drafter.config.layer, hidden_act="evil")
    with pytest.raises(ValueError, match="hidden_act"):
        type(drafter.head)(replace(drafter.config, layer=layer), drafter.head.target_ids)
    with pytest.raises(ValueError, match="intermediate_size"):
        LayerConfig(8, 0, num_heads=2, num_kv_heads=2, head_dim=4)


READINGS = [
    {"norm_before_residual": "false"},
    {"feature_layers": 5},
    {"rope_theta": float("inf")},
    {"layer_convention": "layers"},
]


@pytest.mark.parametrize("options", READINGS, ids=str)
def test_an_option_of_a_reading_is_refused_by_name(options, tmp_path):
    drafter = DRAFTERS["EagleHead"][1]
    drafter.save_pretrained(tmp_path)
    (name,) = options
    with pytest.raises((TypeError, ValueError), match=name):
        EagleDrafter.from_pretrained(tmp_path, TARGETS["EagleHead"], **options)


def test_a_head_is_saved_into_a_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder in ("", tmp_path / "file"):
        with pytest.raises((ValueError, OSError)):
            DRAFTERS["EagleHead"][1].save_pretrained(folder)
