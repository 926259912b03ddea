"""Sibling linear layers as one product: the model stays its owner's, bit for bit, and no part of a
product is ever returned for another input than its own.
"""

import copy
import pickle
from threading import Thread

import pytest
import torch
from architectures import VOCAB, build
from drafting import ragged_prompts
from fingerprint import fingerprint
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from specdec import PromptLookupDrafter, SpeculativeGenerator, Target
from specdec.graphs import no_host_sync
from specdec.hf.layers import QKV
from specdec.targets.edits.fusion import Fusion
from specdec.targets.edits.joint import Group, JointProduct, join_weights, siblings
from specdec.targets.view import private_view
from specdec.types import Draft

IDS, MASK = ragged_prompts(VOCAB, 5, 1, 9)
OPTIONS = {"max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def _without_pointwise_work(monkeypatch):
    """Nothing is compiled."""
    monkeypatch.setattr(Fusion, "fuse", lambda self, view: [])


def text(target) -> torch.Tensor:
    return (
        SpeculativeGenerator(target, PromptLookupDrafter(3))
        .generate(IDS, MASK, **OPTIONS)
        .sequences
    )


def storages(model) -> int:
    return len({p.untyped_storage().data_ptr() for p in model.parameters()})


def products_of_a_step(target) -> int:
    """Matrix products with weights in one forward over three tokens."""
    cache, root = target.init_cache(1, 16), torch.tensor([5])
    start, draft = torch.tensor([0]), Draft(torch.tensor([[6, 7]]))
    with torch.inference_mode(), no_host_sync() as seen:
        target.verify(cache, start, root, draft)
    return sum(op in ("aten.mm.default", "aten.addmm.default") for op, _ in seen.shapes)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_the_model_stays_as_it_was_and_a_step_takes_four_products_a_layer(name):
    model, plain = build(name), build(name)
    before, parameters = fingerprint(model), list(model.parameters())
    layers = model.config.num_hidden_layers
    assert products_of_a_step(Target(model)) == 7 * layers + 1
    assert storages(model) == len(parameters)
    target = Target(model, fuse=True)
    assert products_of_a_step(target) == 4 * layers + 1
    assert fingerprint(model) == before
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    biases = 2 * layers if name == "qwen2" else 0
    assert len(parameters) - storages(model) == 3 * layers + biases
    with torch.no_grad():
        assert model(input_ids=IDS).logits.equal(plain(input_ids=IDS).logits)
    assert text(target).equal(text(plain))
    assert f"{layers} x q_proj, k_proj, v_proj, {layers} x gate_proj, up_proj" in target.notes[-1]


def test_joined_models_are_saved_and_read_as_others(tmp_path):
    model, plain = build("qwen2"), build("qwen2")
    Target(model, fuse=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert fingerprint(again)["weights"] == fingerprint(plain)["weights"]
    save_file(model.state_dict(), tmp_path / "own.safetensors")
    found = load_file(tmp_path / "own.safetensors")
    assert all(found[name].equal(tensor) for name, tensor in plain.state_dict().items())


def test_weights_that_are_loaded_later_are_those_of_both():
    model, other = build("llama"), build("llama", seed=5)
    target = Target(model, fuse=True)
    text(target)
    model.load_state_dict(other.state_dict())
    assert text(target).equal(text(other))


def assign(model):
    model.load_state_dict(build("llama", seed=5).state_dict(), assign=True)


def replace_one(model):
    layer = model.model.layers[1].self_attn.k_proj
    layer.weight = nn.Parameter(2 * layer.weight.detach())


@pytest.mark.parametrize(
    "edit", [lambda model: model.to(torch.float64).to(torch.float32), assign, replace_one]
)
def test_weights_that_are_moved_later_are_noticed_and_joined_again(edit):
    model = build("llama")
    generator = SpeculativeGenerator(Target(model, fuse=True), PromptLookupDrafter(3))
    generator.generate(IDS, MASK, **OPTIONS)
    edit(model)
    with pytest.raises(ValueError, match="build the generator again"):
        generator.generate(IDS, MASK, **OPTIONS)
    expected = text(copy.deepcopy(model))
    again = Target(model, fuse=True)
    assert text(again).equal(expected)
    assert products_of_a_step(again) == 4 * 3 + 1


def test_weights_that_are_moved_before_the_first_call_are_joined_again():
    model = build("llama")
    target = Target(model, fuse=True)
    assign(model)
    assert text(target).equal(text(build("llama", seed=5)))
    assert storages(model) < len(list(model.parameters()))


def test_copies_and_pickles_have_storage_of_their_own_and_one_product_each():
    target = Target(build("llama"), fuse=True)
    expected = text(target)
    copies = copy.deepcopy(target), pickle.loads(pickle.dumps(target))
    with torch.no_grad():
        for parameter in target.model.parameters():
            parameter.mul_(1.5)
    for other in copies:
        assert products_of_a_step(other) == 4 * 3 + 1
        assert text(other).equal(expected)


class OwnLinear(nn.Linear):
    """Stands for a layer of an adapter or of a quantised model."""


LEFT_ALONE = {
    "test_joint_products.OwnLinear": lambda a: setattr(a.v_proj, "__class__", OwnLinear),
    "hooks": lambda a: a.q_proj.register_forward_hook(lambda *_: None),
    "storage that others share": lambda a: setattr(a.v_proj, "weight", a.k_proj.weight),
    "not alike": lambda a: setattr(
        a.v_proj, "bias", nn.Parameter(torch.randn(a.v_proj.out_features))
    ),
}


@pytest.mark.parametrize("word", LEFT_ALONE)
def test_layers_that_cannot_be_joined_are_left_alone_and_named_once(word):
    model = build("llama")
    attention = model.model.layers[1].self_attn
    LEFT_ALONE[word](attention)
    expected = text(copy.deepcopy(model))
    before = [p.data_ptr() for p in attention.parameters()]
    target = Target(model, fuse=True)
    assert [p.data_ptr() for p in attention.parameters()] == before
    joined, left_alone = target.notes[-1].split("left alone: ")
    assert "2 x q_proj, k_proj, v_proj, 3 x gate_proj, up_proj" in joined
    assert left_alone.startswith("1 x q_proj, k_proj, v_proj (")
    assert word in left_alone
    assert text(target).equal(expected)


@pytest.mark.parametrize("name", ["phi3", "gpt2"])
def test_a_model_that_stores_its_products_joined_has_nothing_to_join(name):
    model = build(name)
    target = Target(model, fuse=True)
    assert storages(model) == len(list(model.parameters()))
    assert "products are not joined" in " ".join(target.notes)


def test_products_that_break_a_model_are_undone_and_the_note_says_why(monkeypatch):
    parts = JointProduct.parts
    monkeypatch.setattr(JointProduct, "parts", lambda self, x: parts(self, x)[::-1])
    model = build("llama")
    before = fingerprint(model)
    target = Target(model, fuse=True)
    assert "products are not joined" in target.notes[-1]
    assert "forward" in target.notes[-1] or "Error" in target.notes[-1]
    assert fingerprint(model) == before
    assert storages(model) == len(list(model.parameters()))
    assert text(target).equal(text(build("llama")))


class Siblings(nn.Module):
    """Calls its layers as a test wants it; q, k and v are of width 2, 3 and 4."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(5, n) for n in (2, 3, 4))

    def forward(self, x, between=lambda: None):
        q = self.q_proj(x)
        between()
        return q, self.k_proj(x), self.v_proj(x)


@pytest.fixture(name="pair")
def _pair():
    """A module in a model, and its like in a view with a joint product."""
    model = nn.Sequential(Siblings()).requires_grad_(False)
    groups, _ = siblings(model)
    assert groups == (Group("0", QKV),)
    join_weights(model, groups)
    view = private_view(model)
    JointProduct(view, groups[0]).install()
    return model[0], view[0]


def close(found, expected) -> bool:
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))


def test_another_thread_between_two_layers_changes_nothing(pair):
    model, view = pair
    x, y = torch.randn(2, 3, 5)
    others = []

    def call_in_a_thread():
        thread = Thread(target=lambda: others.append(view(y)))
        thread.start()
        thread.join()

    assert close(view(x, call_in_a_thread), model(x))
    assert close(others[0], model(y))


def test_layers_called_with_other_inputs_or_from_outside_compute_their_own(pair):
    model, view = pair
    x, y = torch.randn(2, 3, 5)
    found = []
    view(x, lambda: found.append((view.k_proj(y), view.v_proj(y), view.k_proj(x))))
    assert close(found[0], (model.k_proj(y), model.v_proj(y), model.k_proj(x)))
    assert close([view.v_proj(y), view.q_proj(x)], [model.v_proj(y), model.q_proj(x)])


def test_a_forward_that_failed_leaves_nothing_behind(pair):
    model, view = pair
    x = torch.randn(3, 5)
    with pytest.raises(ZeroDivisionError):
        view(x, lambda: 1 / 0)
    x.mul_(2)
    assert close([view.k_proj(x)], [model.k_proj(x)])
    assert close(view(x), model(x))


def test_hooks_of_a_layer_that_are_registered_later_run(pair):
    model, view = pair
    x = torch.randn(3, 5)
    model.k_proj.register_forward_hook(lambda module, args, out: out + 1)
    assert close(view(x), model(x))
    model.v_proj.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert close(view(x), model(x))
