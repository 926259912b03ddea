"""A part of a target is HF's model without the layers that are left out, over the same cache."""

import copy

import pytest
import torch
from architectures import VOCAB, build
from torch import nn

from specdec import Target
from specdec.hf.layers import decoder_layers
from specdec.targets.route import Route
from specdec.targets.views import open_views

IDS = torch.arange(12)[None] * 5 % VOCAB
NUM_READ = 7
IN_TUPLES = ["mpt", "falcon_gqa"]
"""Models whose layers return their hidden states inside of a tuple."""


def without_others(model, kept):
    """HF's own model of these layers alone."""
    model = copy.deepcopy(model)
    backbone, blocks = decoder_layers(model)
    name = next(n for n, child in backbone.named_children() if child is blocks)
    setattr(backbone, name, nn.ModuleList(blocks[i] for i in kept))
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = [kinds[i] for i in kept]
    config.num_hidden_layers = len(kept)
    return model


def read(target):
    """Logits of the last tokens, after a chunk with the first ones; and the cache."""
    cache, slots = target.init_cache(1, 16), torch.arange(NUM_READ, IDS.shape[1])[None]
    target.prefill(cache, IDS[:, :NUM_READ], torch.tensor([NUM_READ]), offset=0)
    return *target.forward(IDS[:, NUM_READ:], cache, slots), cache


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "gpt_oss", "gpt2", *IN_TUPLES])
@torch.no_grad()
def test_a_part_is_hfs_model_without_the_other_layers(name):
    model = build(name)
    target, number = Target(model), model.config.get_text_config().num_hidden_layers
    assert target.route.returns_tuples == (name in IN_TUPLES)
    kept = range(1, number, 2)
    logits, _, cache = read(target.part(kept))
    expected = without_others(model, kept)(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(logits, expected[:, NUM_READ:])
    assert [i for i, keys in cache.keys.items() if keys.any()] == list(kept)
    assert torch.equal(read(target.part(range(number)))[0], read(target)[0])


@torch.no_grad()
def test_a_layer_that_is_left_out_changes_no_state():
    target = Target(build("llama"), feature_layers=(1, 2))
    _, features, _ = read(target.part([0]))
    before, after = features.chunk(2, dim=-1)
    assert torch.equal(before, after)
    _, features, _ = read(target)
    assert not torch.equal(*features.chunk(2, dim=-1))


def test_no_layer_of_a_recurrent_model_can_be_left_out():
    model = build("qwen3_5")
    target = Target(model)
    with pytest.raises(ValueError, match="no layers of Qwen3_5ForCausalLM can be left out"):
        target.part([0])
    target.part(range(target.num_layers))


def test_a_route_of_ones_own_opens_views():
    """Nothing is looked for: a route is a value."""
    model = build("llama")
    views = open_views(model, Route())
    with torch.no_grad():
        ours, own = (m(input_ids=IDS, use_cache=False).logits for m in (views.step, model))
    assert torch.equal(ours, own)
    assert views.chunk is views.step is not model
