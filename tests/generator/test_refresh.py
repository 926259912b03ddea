"""Edits of a model that a generator has wrapped: weights that change in place, or are replaced
where nothing depends on their addresses, need nothing; every other edit makes the next call raise
until `refresh`, and then the text is the edited model's own.
"""

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from refusals import refused
from torch import nn

from specdec import ModelDrafter, PromptLookupDrafter, SpeculativeGenerator, Target
from specdec.drafters import Recent, SelfDrafter, Sinks, TopSlots
from specdec.targets.edits.fusion import Fusion

IDS, MASK = ragged_prompts(VOCAB, 5, 1, 9)
GREEDY = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
OTHER = build("llama", seed=5)


@pytest.fixture(autouse=True)
def _without_pointwise_work(monkeypatch):
    """Nothing is compiled."""
    monkeypatch.setattr(Fusion, "fuse", lambda self, view: [])


def text_of(model):
    return model.generate(input_ids=IDS, attention_mask=MASK, **GREEDY)


def drafts_of(result):
    return [[step.draft_tokens for step in steps] for steps in result.steps]


def adapted():
    """A model with an adapter of random weights in its layers."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    torch.manual_seed(0)
    return peft.get_peft_model(build("llama"), config).eval()


def assign(model):
    model.load_state_dict(OTHER.state_dict(), assign=True)


def scale(model):
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 20.0)


def new_head(model):
    model.lm_head = nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)


def add_layer(model):
    model.config.num_hidden_layers += 1
    model.model.layers.append(build("llama", seed=5).model.layers[1])
    model.model.layers[-1].self_attn.layer_idx = 3


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    "edit",
    [lambda model: model.load_state_dict(OTHER.state_dict()), assign],
    ids=["copy", "assign"],
)
def test_other_values_and_other_parameters_count_from_the_next_call_on(edit, graphs):
    model = build("llama")
    generator = SpeculativeGenerator(model, PromptLookupDrafter(3), graphs=graphs)
    before = generator.generate(IDS, MASK, **GREEDY).sequences
    edit(model)
    assert not before.equal(text_of(OTHER))
    assert generator.generate(IDS, MASK, **GREEDY).sequences.equal(text_of(OTHER))


EDITS = {
    "assign, joined": (lambda: build("llama"), assign, "weights replaced or moved"),
    "cast": (lambda: build("llama"), lambda model: model.double(), r"float64 now"),
    "module": (lambda: build("llama"), new_head, "a module replaced"),
    "resized": (lambda: build("llama"), lambda m: m.resize_token_embeddings(VOCAB + 3), "edited"),
    "longer": (lambda: build("llama"), add_layer, "was edited after"),
    "merged": (adapted, lambda model: model.merge_adapter(), "scaled or merged"),
    "scaled": (adapted, scale, "adapters switched, scaled"),
    "added": (adapted, lambda m: m.add_adapter("b", m.peft_config["default"]), "a module replaced"),
}
"""How a model is made and edited, and what the next call says."""


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", EDITS)
def test_every_other_edit_raises_until_the_generator_is_refreshed(kind, graphs):
    make, edit, message = EDITS[kind]
    model = make()
    target = Target(model, fuse="joined" in kind)
    generator = SpeculativeGenerator(target, PromptLookupDrafter(3), graphs=graphs)
    assert generator.generate(IDS, MASK, **GREEDY).sequences.equal(text_of(model))
    edit(model)
    for _ in range(2):  # an error changes nothing
        with pytest.raises(ValueError, match=rf"{message}.*; call generator.refresh\(\)"):
            generator.generate(IDS, MASK, **GREEDY)
    generator.refresh()
    assert generator.target is target
    assert generator.generate(IDS, MASK, **GREEDY).sequences.equal(text_of(model))
    assert bool(target.notes) == ("joined" in kind)


def test_a_draft_model_that_was_cast_is_refreshed_with_the_generator():
    model = build("llama")
    generator = SpeculativeGenerator(model, ModelDrafter(perturbed(model), 3))
    generator.generate(IDS, MASK, **GREEDY)
    generator.drafter.model.double()
    with refused("float64 now; call generator.refresh(), or make the ModelDrafter"):
        generator.generate(IDS, MASK, **GREEDY)
    with refused("float64 now; call generator.refresh(), or make the ModelDrafter"):
        SpeculativeGenerator(model, generator.drafter)
    generator.refresh()
    result = generator.generate(IDS, MASK, **GREEDY)
    assert result.sequences.equal(text_of(model))
    assert result.stats.acceptance_rate > 0.1


@pytest.mark.parametrize("layers", [None, (0, 1)])
def test_a_target_that_drafts_for_itself_is_refreshed_with_the_generator(layers):
    model = build("llama")
    options = {"visible": Sinks(2) + Recent(4), "layers": layers}
    generator = SpeculativeGenerator(model, SelfDrafter(model, 3, **options))
    generator.generate(IDS, MASK, **GREEDY)
    model.double()
    with refused("float64 now; call generator.refresh()"):
        generator.generate(IDS, MASK, **GREEDY)
    generator.refresh()
    result = generator.generate(IDS, MASK, **GREEDY)
    again = SpeculativeGenerator(model, SelfDrafter(model, 3, **options))
    assert result.sequences.equal(text_of(model))
    assert drafts_of(result) == drafts_of(again.generate(IDS, MASK, **GREEDY))


def test_a_self_drafter_whose_slots_can_no_longer_be_chosen_says_so():
    """A layer of another model has another configuration, whose attention no view can set."""
    model = build("llama")
    generator = SpeculativeGenerator(model, SelfDrafter(model, 3, visible=TopSlots(2) + Recent(2)))
    model.model.layers[1] = build("llama", seed=5).model.layers[1]
    generator.refresh()
    with pytest.raises(ValueError, match="its queries are not known; use Sinks and Recent"):
        generator.generate(IDS, MASK, **GREEDY)
    plain = SpeculativeGenerator(model, PromptLookupDrafter(3))
    assert plain.generate(IDS, MASK, **GREEDY).sequences.equal(text_of(model))


def test_a_model_that_can_no_longer_be_decoded_leaves_all_as_it_was():
    model = build("llama")
    generator = SpeculativeGenerator(model, None)
    expected = generator.generate(IDS, MASK, **GREEDY).sequences
    route, block = generator.target.route, model.model.layers[0]
    model.train()
    block.mlp.drop_rate = 0.5
    with pytest.raises(ValueError, match="in training mode"):
        generator.refresh()
    model.eval()
    assert generator.target.route is route
    assert generator.generate(IDS, MASK, **GREEDY).sequences.equal(expected)
