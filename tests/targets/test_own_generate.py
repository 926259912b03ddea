"""A class, an object or a wrapper with code of its own around a model: text is that of its own
`generate`, or it is refused by name; and what a forward does not name is passed on.
"""

from functools import wraps

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from refusals import refused
from torch import nn
from transformers import LlamaForCausalLM, SuppressTokensLogitsProcessor

from specdec import ModelDrafter, SpeculativeGenerator

IDS, MASK = ragged_prompts(VOCAB, 3, 6)
GREEDY = {"max_new_tokens": 10, "do_sample": False}


def text_of(model, **options):
    return model.generate(IDS, attention_mask=MASK, pad_token_id=0, **GREEDY, **options)


def derived(name="llama", **methods):
    """A model of a class that somebody has derived from HF's."""
    model = build(name)
    model.__class__ = type("Mine", (type(model),), methods)
    return model


def of_parent(self, method, *args, **kwargs):
    return getattr(super(type(self), self), method)(*args, **kwargs)


def everything(self, *args, **kwargs):
    return of_parent(self, "forward", *args, **kwargs)


def with_other_logits(self, *args, **kwargs):
    out = of_parent(self, "forward", *args, **kwargs)
    out.logits = out.logits + torch.linspace(0, 3, out.logits.shape[-1])
    return out


FORWARDS = {
    "everything": everything,
    "ids_and_others": lambda self, input_ids, **more: everything(self, input_ids, **more),
    "with_other_logits": with_other_logits,
}


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3", "mistral_sliding", "gpt_oss"])
def test_what_a_forward_does_not_name_is_passed_on(name, forward):
    model = derived(name, forward=FORWARDS[forward])
    expected = text_of(model)
    assert expected.equal(text_of(build(name))) == (forward != "with_other_logits")
    generator = SpeculativeGenerator(model, ModelDrafter(perturbed(build(name)), 3))
    assert generator.generate(IDS, MASK, **GREEDY).sequences.equal(expected)
    assert text_of(model, custom_generate=generator).equal(expected)


def test_a_row_of_absolute_positions_stands_at_those_of_its_own():
    """HF's `generate` gives positions to forwards that name them alone."""
    model = derived("gpt2", forward=everything)
    generator = SpeculativeGenerator(model, None)
    texts = generator.generate(IDS, MASK, **GREEDY).texts
    for row, mask, text in zip(IDS, MASK, texts, strict=True):
        alone = row[mask.bool()][None]
        assert model.generate(alone, pad_token_id=0, **GREEDY)[0, alone.shape[1] :].tolist() == text


def test_a_class_derived_twice_and_a_draft_model_are_read_alike():
    def with_keywords(self, input_ids=None, attention_mask=None, **kwargs):
        return LlamaForCausalLM.forward(self, input_ids, attention_mask, **kwargs)

    model = derived(forward=everything)
    model.__class__ = type("Yours", (type(model),), {"forward": with_keywords})
    generator = SpeculativeGenerator(model, ModelDrafter(model, 3))
    assert generator.generate(IDS, MASK, **GREEDY).sequences.equal(text_of(build("llama")))
    assert generator.last_result.stats.acceptance_rate == 1


def test_a_forward_that_drops_what_it_does_not_name_is_refused():
    def dropping(self, input_ids=None, attention_mask=None, cache=None, use_cache=None, **kwargs):
        own = {"attention_mask": attention_mask, "cache": cache, "use_cache": use_cache}
        return of_parent(self, "forward", input_ids, **own)

    with refused("Mine cannot be decoded"):
        SpeculativeGenerator(derived(forward=dropping), None)


def suppressing(generate):
    def own(*args, **options):
        without = SuppressTokensLogitsProcessor([*range(20)], "cpu")
        return generate(*args, logits_processor=[without], **options)

    return own


def beginning(generate):
    """Sampled text alone is another one."""

    def own(*args, **options):
        more = {"top_k": 2} if options.get("do_sample") else {}
        return generate(*args, **options, **more)

    return own


def method(change):
    return change(lambda self, *args, **options: of_parent(self, "generate", *args, **options))


CHANGES = {
    "suppressing": suppressing,
    "beginning": beginning,
    # torch's decorator stands around it, as around HF's.
    "without_gradients": lambda generate: torch.no_grad()(suppressing(generate)),
    "named_alike": lambda generate: wraps(generate)(suppressing(generate)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_method", [True, False], ids=["class", "object"])
def test_a_generate_of_its_own_is_the_one_to_call(change, is_method):
    change = CHANGES[change]
    model = derived(generate=method(change)) if is_method else build("llama")
    if not is_method:
        model.generate = change(model.generate)
    generator = SpeculativeGenerator(model, "lookup")
    named = r"has one of its own, .*; call it: model\.generate\(\.\.\., custom_generate=generator\)"
    with pytest.raises(ValueError, match=named):
        generator.generate(IDS, MASK, **GREEDY)
    with pytest.raises(ValueError, match=named):
        list(generator.stream(IDS[:1], MASK[:1], **GREEDY))
    assert text_of(model, custom_generate=generator).equal(text_of(model))
    assert sum(generator.last_result.stats.steps) > 0


def test_a_generate_that_is_replaced_later_is_seen():
    model = build("llama")
    generator = SpeculativeGenerator(model, None)
    assert generator.generate(IDS, MASK, **GREEDY).sequences.equal(text_of(model))
    model.generate = suppressing(model.generate)
    with pytest.raises(ValueError, match="has one of its own"):
        generator.generate(IDS, MASK, **GREEDY)
    del model.generate
    assert generator.generate(IDS, MASK, **GREEDY).sequences.equal(text_of(model))


def test_a_generate_of_its_own_that_changes_nothing_is_no_fault():
    model = derived(generate=method(lambda generate: generate))
    generator = SpeculativeGenerator(model, None)
    assert generator.generate(IDS, MASK, **GREEDY).sequences.equal(text_of(model))


class Around(nn.Module):
    """A wrapper that looks like a compiled model."""

    def __init__(self, model, change):
        super().__init__()
        self._orig_mod, self.generate = model, change(model.generate)


class AroundAsPeft(nn.Module):
    """One that looks like PEFT's, and like nothing else."""

    def __init__(self, model, change):
        super().__init__()
        self.peft_config = {}
        self.inside, self.generate = model, change(model.generate)


@pytest.mark.parametrize("kind", [Around, AroundAsPeft])
def test_a_wrapper_that_writes_other_text_than_its_model_is_refused(kind):
    same = SpeculativeGenerator(kind(build("llama"), lambda generate: generate), None)
    assert same.generate(IDS, MASK, **GREEDY).sequences.equal(text_of(build("llama")))
    for change in (suppressing, beginning):
        for make in (SpeculativeGenerator, ModelDrafter):
            more = (None,) if make is SpeculativeGenerator else ()
            with refused(f"and {kind.__name__} writes other text than the"):
                make(kind(build("llama"), change), *more)


def test_a_wrapper_that_cannot_generate_is_refused():
    class Silent(AroundAsPeft):
        generate = None

    with refused("Silent writes other text .. its generate raises TypeError"):
        SpeculativeGenerator(Silent(build("llama"), lambda generate: None), None)


def test_trying_a_wrapper_leaves_seeds_and_hooks_as_they_are():
    model = Around(build("llama"), lambda generate: generate)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    SpeculativeGenerator(model, None)
    assert torch.get_rng_state().equal(state)
