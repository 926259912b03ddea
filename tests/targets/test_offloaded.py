"""Models of which no weight is on a device: accelerate's hooks bring each in where it is used."""

from functools import partial

import eagle_heads
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from architectures import build
from diagonal import first
from drafter_table import WIDE, eagle, masks
from transformers import AutoModelForCausalLM

from specdec import (
    EagleDrafter,
    MaskTokenDrafter,
    ModelDrafter,
    PromptLookupDrafter,
    SelfDrafter,
    SpeculativeGenerator,
    Target,
    certify,
    zoo,
)
from specdec.loading import load_drafter

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def on_disk(model, folder):
    model.save_pretrained(folder / "model")
    places = {"device_map": {"": "disk"}, "offload_folder": folder / "offloaded"}
    return AutoModelForCausalLM.from_pretrained(folder / "model", **places).eval()


WAYS = {
    "cpu": lambda model, folder: cpu_offload(model, execution_device=CPU),
    "disk": lambda model, folder: disk_offload(model, str(folder), execution_device=CPU),
    "device map": on_disk,
}
DRAFTERS = {
    "none": lambda target: None,
    "lookup": lambda target: PromptLookupDrafter(3),
    "model": lambda target: ModelDrafter(target.model, 3),
    "self": lambda target: SelfDrafter(target, 3, layers=2),
    "eagle3": lambda target: EagleDrafter(eagle(**WIDE), target, 3),
    "dflash": lambda target: MaskTokenDrafter(masks("dflash", has_embed_tokens=True), target, 3),
}


@pytest.mark.parametrize("way", first(WAYS, ["device map"]))
def test_a_model_that_is_offloaded_as_a_whole_is_decoded(way, tmp_path):
    expected = SpeculativeGenerator(build("llama"), None).generate(IDS, max_new_tokens=9)
    target = Target(WAYS[way](build("llama"), tmp_path))
    assert all(weight.is_meta for weight in target.model.parameters())
    assert target.device == CPU
    for name, make in DRAFTERS.items():
        generator = SpeculativeGenerator(target, make(target))
        found = generator.generate(IDS, max_new_tokens=9)
        assert found.sequences.equal(expected.sequences), name
    few = {"num_samples": 2, "max_new_tokens": 4, "audit_tokens": 4}
    assert certify(SpeculativeGenerator(target, "lookup"), IDS.tolist(), **few).passed


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5", "mpt"])
def test_other_models_that_are_offloaded_as_a_whole_are_decoded(name):
    expected = SpeculativeGenerator(build(name), None).generate(IDS, max_new_tokens=9)
    model = cpu_offload(build(name), execution_device=CPU)
    found = SpeculativeGenerator(model, PromptLookupDrafter(3)).generate(IDS, max_new_tokens=9)
    assert found.sequences.equal(expected.sequences)


def test_a_head_that_reads_offloaded_embeddings_is_refused_in_words():
    model = cpu_offload(build("llama"), execution_device=CPU)
    head = eagle_heads.head_for(build("llama"), kind="input", has_lm_head=True)
    with pytest.raises(ValueError, match="the target's are offloaded, where no row"):
        EagleDrafter(head, model, 3)


@pytest.mark.parametrize("make", [Target, partial(SpeculativeGenerator, drafter=None)])
def test_a_model_that_was_never_loaded_is_refused_in_words(make):
    with pytest.raises(ValueError, match="is on the meta device and has no weights; load it"):
        make(build("llama").to("meta"))


@pytest.mark.parametrize("name", ["model", "mask-token"])
def test_drafters_of_the_zoo_go_where_an_offloaded_target_computes(name):
    target = cpu_offload(zoo.load_target(), execution_device=CPU)
    options = {"max_new_tokens": 6, "do_sample": True, "seed": 0}
    found = SpeculativeGenerator(target, zoo.load_drafter(name, target)).generate(IDS, **options)
    whole = zoo.load_target()
    drafter = zoo.load_drafter(name, whole)
    expected = SpeculativeGenerator(whole, drafter).generate(IDS, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()


def test_a_draft_model_by_its_path_goes_where_an_offloaded_target_computes(tmp_path):
    build("llama").save_pretrained(tmp_path)
    target = cpu_offload(build("llama"), execution_device=CPU)
    drafter = load_drafter(str(tmp_path), target)
    found = SpeculativeGenerator(target, drafter).generate(IDS, max_new_tokens=4)
    assert found.sequences.shape == (2, 8)
