"""Private views of a model: the same weights and hooks, other modules; and edits that they miss."""

import copy
from functools import wraps
from types import MethodType

import pytest
import torch
from accelerate import dispatch_model
from accelerate.utils.operations import convert_outputs_to_fp32
from architectures import ARCHITECTURES, VOCAB, build
from diagonal import case
from drafting import ragged_prompts
from fingerprint import fingerprint
from refusals import refused

from specdec import ModelDrafter, PromptLookupDrafter, SpeculativeGenerator, zoo
from specdec.targets.view import private_view

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


def test_layers_that_remain_after_others_were_deleted_are_the_views_own():
    """Torch then holds a list's modules in an ordered dictionary."""
    model = build("llama")
    del model.model.layers[2]
    model.config.num_hidden_layers = 2
    view = private_view(model)
    assert not set(map(id, view.modules())) & set(map(id, model.modules()))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    text = model.generate(IDS, attention_mask=MASK, **options)
    found = SpeculativeGenerator(model, PromptLookupDrafter(3)).generate(IDS, MASK, **options)
    assert found.sequences.equal(text)


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


@pytest.mark.parametrize("whose", ["target", "draft"])
def test_a_model_in_training_mode_is_noticed_at_the_next_call(whose):
    """Other edits stand in `generator/test_refresh.py`."""
    models = {"target": build("llama"), "draft": build("llama", seed=1)}
    generator = SpeculativeGenerator(models["target"], ModelDrafter(models["draft"], 3))
    generator.generate(IDS, MASK, max_new_tokens=4)
    models[whose].train().model.layers[0].self_attn.attention_dropout = 0.1
    with refused("training mode .. self_attn.attention_dropout=0.1"):
        generator.generate(IDS, MASK, max_new_tokens=4)


def test_a_call_under_autocast_is_refused():
    generator = SpeculativeGenerator(build("llama"), None)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    with autocast, refused("does not run under torch.autocast"):
        generator.generate(IDS, MASK, max_new_tokens=4)


def log_calls(model):
    """Returns the list that the new forward adds to."""
    forward, calls = model.forward, []

    @wraps(forward)
    def logging(*args, **kwargs):
        calls.append(len(args))
        return forward(*args, **kwargs)

    model.forward = logging
    return calls


def replace_plainly(model):
    own = model.forward
    model.forward = lambda *args, forward=own, **kwargs: forward(*args, **kwargs)


def compile_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


def replace_as_trl(model):
    """A method of the model that calls the one before it through a closure."""
    original = model.forward

    @wraps(type(model).forward)
    def fused(self, *args, **kwargs):
        return original(*args, **kwargs)

    model.forward = MethodType(fused, model)


def replace_as_accelerate(model):
    """Mixed precision, over what TRL does."""
    replace_as_trl(model)
    in_bfloat16 = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward.__func__)
    model.forward = MethodType(convert_outputs_to_fp32(in_bfloat16), model)


BEFORE, LATER, BETWEEN = "before the generator", "before its first call", "between calls"
REPLACEMENTS = [
    *((log_calls, BEFORE, "eagle3"), (log_calls, BETWEEN, "lookup")),
    *((replace_plainly, LATER, "model"), (replace_plainly, BETWEEN, "none")),
    *((compile_forward, BEFORE, "none"), (compile_forward, BETWEEN, "model")),
    *((replace_as_trl, BEFORE, "lookup"), (replace_as_trl, LATER, "eagle3")),
    (replace_as_trl, BETWEEN, "model"),
    *((replace_as_accelerate, BEFORE, "model"), (replace_as_accelerate, LATER, "lookup")),
    (replace_as_accelerate, BETWEEN, "eagle3"),
]
"""Each replacement with several moments and drafters."""
QUICK = [(log_calls, BEFORE, "eagle3"), (replace_as_accelerate, LATER, "lookup")]
DRAFTERS = {
    "none": lambda target: None,
    "lookup": lambda target: PromptLookupDrafter(3),
    "eagle3": lambda target: zoo.load_drafter("eagle3", target),
    "model": lambda target: zoo.load_drafter("model", target),
}
TEXT = zoo.load_tokenizer()("def main(argv):\n", return_tensors="pt").input_ids


def accepted(result):
    return [[(step.draft_tokens, step.num_accepted) for step in row] for row in result.steps]


@pytest.mark.parametrize(
    ("replace", "when", "drafter"),
    [case([*each], each in QUICK) for each in REPLACEMENTS],
)
def test_a_forward_that_was_replaced_runs_around_the_view(replace, when, drafter):
    target = zoo.load_target()
    expected = SpeculativeGenerator(target, DRAFTERS[drafter](target))
    expected = expected.generate(TEXT, max_new_tokens=12)
    if when == BEFORE:
        replace(target)
    generator = SpeculativeGenerator(target, DRAFTERS[drafter](target))
    if when == BETWEEN:
        generator.generate(TEXT, max_new_tokens=3)
    if when != BEFORE:
        replace(target)
    found = generator.generate(TEXT, max_new_tokens=12)
    text = target.generate(TEXT, attention_mask=torch.ones_like(TEXT), max_new_tokens=12)
    assert torch.equal(found.sequences, text)
    if replace is not replace_as_accelerate:
        assert accepted(found) == accepted(expected)


def test_a_draft_model_whose_forward_is_replaced_accepts_as_before():
    """A target of the same weights, so that nothing is rejected as long as it drafts the same."""
    target, draft = build("llama"), build("llama")
    generator = SpeculativeGenerator(target, ModelDrafter(draft, 3))
    calls = log_calls(draft)
    assert generator.generate(IDS[1:], max_new_tokens=16).stats.acceptance_length == 4
    assert calls  # a wrapper keeps its log


def test_graphs_are_captured_anew_around_another_forward():
    target = build("llama")
    generator = SpeculativeGenerator(target, PromptLookupDrafter(3), graphs=True)
    before = generator.generate(IDS, max_new_tokens=30)
    calls = log_calls(target)
    assert torch.equal(generator.generate(IDS, max_new_tokens=30).sequences, before.sequences)
    assert calls


def test_a_copy_of_a_model_whose_forward_calls_the_first_one_is_refused():
    """As it is HF's own: `copy.deepcopy` leaves functions, and what they hold, as they are."""
    model = build("llama")
    generator = SpeculativeGenerator(model, PromptLookupDrafter(3))
    replace_as_trl(model)
    expected = generator.generate(IDS, MASK, max_new_tokens=4).sequences
    other = copy.deepcopy(generator)
    with refused("in the place of the model.forward may call another"):
        other.generate(IDS, MASK, max_new_tokens=4)
    again = generator.generate(IDS, MASK, max_new_tokens=4).sequences
    assert torch.equal(again, expected)


class Trainer:
    """Its model's forward is a method of its own, which calls what was there before."""

    def __init__(self, model):
        self.own_forward = model.forward
        model.forward = self.forward

    def forward(self, *args, **kwargs):
        return self.own_forward(*args, **kwargs)


def test_a_forward_that_cannot_be_followed_is_refused_in_words():
    """When a generator is made, and when it is called."""
    model = build("llama")
    words = "a function in the place of the model.forward may call another model than a view"
    generator = SpeculativeGenerator(model, PromptLookupDrafter(3))
    before = generator.generate(IDS, MASK, max_new_tokens=4).sequences
    own = model.forward
    Trainer(model)
    with refused(words):
        SpeculativeGenerator(model, None)
    with refused(words):
        generator.generate(IDS, MASK, max_new_tokens=4)
    model.forward = own
    assert torch.equal(generator.generate(IDS, MASK, max_new_tokens=4).sequences, before)
