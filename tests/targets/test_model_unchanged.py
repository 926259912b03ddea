"""The target and the draft model are left as they were found, whatever happens.

Weights to the byte, attention implementation, hooks, modes and configuration are the same after a
generation, and after an exception from anywhere inside one; and HF `generate` gives the same text
afterwards.
"""

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from fingerprint import fingerprint
from transformers import LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from specdec import ModelDrafter, SpeculativeGenerator

IDS, MASK = ragged_prompts(VOCAB, 2, 5, 8)
NUM_NEW = 12
NAMES = ["llama", "gemma3", "gpt2", "gptj", "qwen3_moe"]  # own attention, sub-configs, dense masks


class Rig:
    """A target, a draft model, and what both looked like at first."""

    def __init__(self, name: str):
        self.target = build(name)
        self.draft = perturbed(self.target)
        self.text, self.found = self.hf_text(), self.prints()
        self.generator = SpeculativeGenerator(self.target, ModelDrafter(self.draft))

    def prints(self) -> list:
        return [fingerprint(model) for model in (self.target, self.draft)]

    def hf_text(self) -> list:
        options = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
        return self.target.generate(IDS, attention_mask=MASK, **options).tolist()

    def generate(self, **options) -> list:
        return self.generator.generate(IDS, MASK, max_new_tokens=NUM_NEW, **options)

    def check(self):
        """Nothing has changed, and everything still works."""
        assert self.prints() == self.found
        assert self.hf_text() == self.text
        assert self.generate().sequences.tolist() == self.text


@pytest.fixture
def rig(request):
    return Rig(getattr(request, "param", "llama"))


class OnPurposeError(Exception):
    """Raised on purpose."""


class FailAtCall:
    """Raises at its n-th call, and gives back until then what it was given last."""

    is_stateless = True

    def __init__(self, number: int, error: type[BaseException] = OnPurposeError):
        self.number, self.error, self.calls = number, error, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls == self.number:
            raise self.error
        return args[-1]


class FailingStreamer(FailAtCall, BaseStreamer):
    """Swallows tokens until it fails."""

    def put(self, value):
        self(value)

    def end(self):
        """Nothing."""


def failing_criterion(number: int):
    """Never met until it fails."""
    fail = FailAtCall(number)
    return lambda ids, scores, **_: fail(torch.zeros(len(ids), dtype=torch.bool))


@pytest.mark.parametrize("rig", NAMES, indirect=True)
def test_a_generation_changes_nothing_nor_does_the_state_between_its_steps(rig):
    rig.generate(do_sample=True, seed=1, top_p=0.9)
    for _ in rig.generator.stream(IDS, MASK, max_new_tokens=NUM_NEW):
        assert rig.prints() == rig.found
    rig.check()


@pytest.mark.parametrize(
    ("rig", "whose", "call"),  # the prompt, the first step, a later one
    [("llama", "target", 1), ("gpt2", "target", 2), ("gemma3", "draft", 4)],
    indirect=["rig"],
)
def test_an_exception_inside_a_forward_changes_nothing(rig, whose, call):
    model = getattr(rig, whose)
    last_attention = [m for n, m in model.named_modules() if n.endswith(("attn", "attention"))][-1]
    failure = FailAtCall(0)
    # The model itself is read before the call.
    handle = last_attention.register_forward_hook(
        lambda module, args, out: out if module is last_attention else failure(out)
    )
    rig.generate()  # a hook brings a new trial of the model, which is to pass
    failure.number, failure.calls = call, 0
    while_hooked = fingerprint(model)
    with pytest.raises(OnPurposeError):
        rig.generate()
    assert failure.calls == call
    assert fingerprint(model) == while_hooked
    handle.remove()
    rig.check()


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"logits_processor": LogitsProcessorList([FailAtCall(6)])},
        lambda: {"stopping_criteria": [failing_criterion(3)]},
        lambda: {"streamer": FailingStreamer(1, KeyboardInterrupt)},
        lambda: {"streamer": FailingStreamer(4)},
    ],
)
def test_an_exception_in_code_of_the_user_changes_nothing(rig, make):
    with pytest.raises((OnPurposeError, KeyboardInterrupt)):
        rig.generate(**make())
    rig.check()


def test_a_model_that_fails_while_it_is_wrapped_is_left_alone(rig):
    def fail(*args):
        raise OnPurposeError("on purpose")

    last = [module for module in rig.draft.modules() if not list(module.children())][-1]
    handle = last.register_forward_hook(fail)
    while_hooked = fingerprint(rig.draft)
    with pytest.raises(ValueError, match=r"cannot be decoded over specdec's cache .*on purpose"):
        ModelDrafter(rig.draft)
    assert fingerprint(rig.draft) == while_hooked
    handle.remove()
    rig.check()
