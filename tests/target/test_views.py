"""Private views of a model: the same weights and hooks, other modules; and edits that they miss."""

from functools import partial
from types import MethodType

import pytest
import torch
from accelerate import dispatch_model
from architectures import ARCHITECTURES, VOCAB, build
from drafting import ragged_prompts
from fingerprint import fingerprint

from specdec import PromptLookupDrafter, SpeculativeGenerator, Target
from specdec.target.view import private_view

IDS, MASK = ragged_prompts(VOCAB, 2, 5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_view_computes_what_the_model_computes_and_shares_its_tensors_only(name):
    model = build(name)
    before = fingerprint(model)
    view = private_view(model)
    assert all(a is b for a, b in zip(view.parameters(), model.parameters(), strict=True))
    assert not set(map(id, view.modules())) & set(map(id, model.modules()))
    for module in view.modules():
        for value in vars(module).values():
            assert not any(value is other for other in model.modules())
    view.config.vocab_size = 1
    with torch.no_grad():
        assert torch.equal(view(input_ids=IDS).logits, model(input_ids=IDS).logits)
    assert fingerprint(model) == before


def test_hooks_that_are_registered_later_and_weights_that_change_are_those_of_both():
    model = build("llama")
    view, calls = private_view(model), []
    handle = model.lm_head.register_forward_hook(lambda module, args, out: calls.append(module))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)
    with torch.no_grad():
        logits = view(input_ids=IDS).logits
        handle.remove()
        assert torch.equal(logits, model(input_ids=IDS).logits)
    assert calls == [view.lm_head]


def test_methods_and_partial_functions_are_bound_to_the_view():
    model = build("llama")
    layer = model.model.layers[0]
    layer._old_forward = layer.forward
    layer.forward = partial(
        lambda module, *args, **kwargs: module._old_forward(*args, **kwargs), layer
    )
    model.lm_head.forward = MethodType(type(model.lm_head).forward, model.lm_head)
    view = private_view(model)
    assert view.model.layers[0].forward.args[0] is view.model.layers[0]
    assert view.model.layers[0]._old_forward.__self__ is view.model.layers[0]
    assert view.lm_head.forward.__self__ is view.lm_head


def test_a_model_that_accelerate_has_dispatched_is_decoded_with_its_hooks(tmp_path):
    """Layers on disk are brought in by hooks that replace the modules' forwards."""
    expected = SpeculativeGenerator(build("llama"), None).generate(IDS, MASK, max_new_tokens=9)
    model = build("llama")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i else "cpu" for i in range(3)} | {"lm_head": "cpu"}
    model = dispatch_model(model, places, offload_dir=str(tmp_path), main_device="cpu")
    generator = SpeculativeGenerator(model, PromptLookupDrafter(3))
    found = generator.generate(IDS, MASK, max_new_tokens=9)
    assert torch.equal(found.sequences, expected.sequences)


def replace_layer(model):
    model.model.layers[1] = build("llama", seed=5).model.layers[1]


def resize_embeddings(model):
    model.resize_token_embeddings(VOCAB + 3)


def add_layer(model):
    model.config.num_hidden_layers += 1
    model.model.layers.append(build("llama", seed=5).model.layers[1])
    model.model.layers[-1].self_attn.layer_idx = 3


@pytest.mark.parametrize("edit", [replace_layer, resize_embeddings, add_layer])
def test_a_model_that_was_edited_is_noticed_at_the_next_call(edit):
    model = build("llama")
    generator = SpeculativeGenerator(model, PromptLookupDrafter(3))
    generator.generate(IDS, MASK, max_new_tokens=4)
    edit(model)
    with pytest.raises(ValueError, match=r"was edited after .* build the generator again"):
        generator.generate(IDS, MASK, max_new_tokens=4)
    Target(model)  # which is all that it takes
