"""The self-test of a model is made once, and again when anything was edited that decides it."""

import gc
import weakref
from functools import partialmethod

import pytest
import torch
from architectures import VOCAB, build
from assistants import target_of
from diagonal import first
from drafting import ragged_prompts
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

from specdec import ModelDrafter, PromptLookupDrafter, SpeculativeGenerator, Target
from specdec.targets.edits.fusion import Fusion

IDS, MASK = ragged_prompts(VOCAB, 5, 2)
OPTIONS = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def _without_inductor(monkeypatch):
    """What is compiled is traced only."""
    traced = partialmethod(Fusion.__init__, lambda graph, example_inputs: graph)
    monkeypatch.setattr(Fusion, "__init__", traced)


class Counter(TorchFunctionMode):
    """Counts forwards by their embeddings; nothing of it is in a model."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls += function is torch.nn.functional.embedding
        return function(*args, **(kwargs or {}))


def forwards(function) -> int:
    """How many forwards a function makes, those of views among them."""
    with Counter() as counter:
        function()
    return counter.calls


@pytest.mark.parametrize("fuse", first([False, True], [False]))
def test_the_second_target_over_a_model_runs_no_forward(fuse):
    model = build("llama")
    assert forwards(lambda: Target(model, fuse=fuse)) >= 4
    assert forwards(lambda: Target(model, fuse=fuse)) == 0
    assert forwards(lambda: Target(model, fuse=fuse, feature_layers=(1, "final"))) == 0
    if not fuse:
        assert forwards(lambda: ModelDrafter(model, 2)) == 0
        assert forwards(lambda: SpeculativeGenerator(model, None)) == 0
    assert forwards(lambda: Target(model, fuse=not fuse)) >= 4
    assert forwards(lambda: Target(model, fuse=fuse)) == 0


def replace_a_forward(model):
    layer = model.model.layers[1].mlp
    forward = layer.forward
    layer.forward = lambda x: 2 * forward(x)


EDITS = {
    "module": lambda model: model.model.layers.__setitem__(
        1, build("llama", seed=5).model.layers[1]
    ),
    "attention": lambda model: AttentionInterface.register("sdpa", lambda *a, **o: sdpa(*a, **o)),
    "configuration": lambda model: model.config.rope_parameters.update(rope_theta=20_000.0),
    "setting": lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.7),
    "forward": replace_a_forward,
    "hook": lambda model: model.model.layers[1].mlp.register_forward_hook(
        lambda module, args, out: 2 * out
    ),
    "implementation": lambda model: model.set_attn_implementation("eager"),
    "cast": lambda model: model.to(torch.bfloat16),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_model_that_was_edited_is_tried_again(edit, monkeypatch):
    model = build("llama")
    first = Target(model).route
    known = {**AttentionInterface._global_mapping}
    monkeypatch.setattr(AttentionInterface, "_global_mapping", known)
    EDITS[edit](model)
    assert forwards(lambda: Target(model)) >= 4
    again = Target(model).route
    assert again is not first
    assert Target(model).route is again


def test_a_model_whose_layers_differ_in_the_width_of_their_heads_is_known_until_it_is_edited():
    """HF's configurations of such models cannot be compared."""
    model = target_of("E2B")
    first = Target(model).route
    assert Target(model).route is first
    model.config.sliding_window = 7
    assert Target(model).route is not first


def test_a_hook_in_the_place_of_another_is_seen():
    """Though it may live at the same address."""
    model = build("llama")
    layer = model.model.layers[1].mlp
    for _ in range(5):
        handle = layer.register_forward_hook(lambda module, args, out: None)
        assert forwards(lambda: Target(model)) >= 4
        handle.remove()


def test_values_of_weights_need_no_other_trial():
    model = build("llama")
    Target(model)
    model.load_state_dict(build("llama", seed=5).state_dict())
    assert forwards(lambda: Target(model)) == 0


def test_a_model_that_is_refused_is_tried_again():
    model = build("llama")
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *args: 1 / 0)
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be decoded"):
            Target(model)
    handle.remove()
    Target(model)


@pytest.mark.parametrize("fuse", first([False, True], [False]))
def test_what_is_known_of_a_model_does_not_keep_it(fuse):
    model = build("llama")
    model.model.layers[1].mlp.register_forward_hook(lambda *args, owner=model: None)
    target = Target(model, fuse=fuse)
    SpeculativeGenerator(target, PromptLookupDrafter(2)).generate(IDS, MASK, **OPTIONS)
    there = [weakref.ref(model), weakref.ref(model.lm_head.weight)]
    del model, target
    gc.collect()
    assert [ref() for ref in there] == [None, None]
