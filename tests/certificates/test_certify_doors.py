"""What cannot be certified is refused in words that say what was expected and what to do."""

import io
import sys

import pytest
import torch
from architectures import build
from transformers import AutoModelForCausalLM

from specdec import (
    BlockSampler,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    certify,
)
from specdec.lab.certificates import ForeignSampler, Sentinel
from specdec.lab.certificates.bar import BAR
from specdec.lab.certificates.generator.report import certify_generator
from specdec.lab.certificates.sampler.exact import certify_sampler
from specdec.samplers import TypicalSampler

PROMPTS = [[7, 3, 9], [5, 2]]
QUICK = {"num_samples": 4, "max_new_tokens": 6, "audit_tokens": 4}
MODEL = build("llama")
FEW = {"sizes": ((3, 1, 2),)}


@pytest.fixture(scope="module")
def generator():
    """Of random weights."""
    return SpeculativeGenerator(MODEL, PromptLookupDrafter(3))


def of_vocabulary(size):
    """A model of the same kind."""
    config = type(MODEL.config)(**{**MODEL.config.to_dict(), "vocab_size": size})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("more", [-40, 20])
def test_a_reference_of_another_vocabulary_is_refused(generator, more):
    size = MODEL.config.vocab_size
    message = f"reference has a vocabulary of {size + more} and the target one of {size}; pass"
    for door in (lambda own: certify(generator, PROMPTS, reference=own, **QUICK), sentinel_of):
        with pytest.raises(ValueError, match=message):
            door(of_vocabulary(size + more))


def sentinel_of(reference):
    """With a reference."""
    return Sentinel(SpeculativeGenerator(MODEL, None), reference=reference)


def test_a_reference_without_a_head_is_refused(generator):
    with pytest.raises(TypeError, match="a LlamaModel has none; pass the model with its head"):
        certify(generator, PROMPTS, reference=MODEL.model, **QUICK)


def test_a_reference_is_a_model(generator):
    for value, got in (("x", "'x'"), (type(MODEL), "the class"), (generator.target, "a Target")):
        with pytest.raises(TypeError, match=f"reference must be a model of HF's.*got {got}"):
            certify(generator, PROMPTS, reference=value, **QUICK)


@pytest.mark.parametrize("rule", [BlockSampler, RejectionSampler, ForeignSampler])
def test_the_class_of_a_rule_is_no_rule(rule):
    with pytest.raises(
        TypeError, match=rf"got the class {rule.__name__}; pass an instance, {rule.__name__}\("
    ):
        certify(rule)
    with pytest.raises(TypeError, match=rf"got the class; pass {rule.__name__}\(\)"):
        certify_sampler(rule)


def test_what_is_neither_rule_nor_generator_is_refused(generator):
    with pytest.raises(
        TypeError, match=r"got the class Spec.*pass an instance, SpeculativeGenerator\("
    ):
        certify(SpeculativeGenerator, PROMPTS)
    with pytest.raises(TypeError, match="Sampler or a SpeculativeGenerator, got 'block'"):
        certify("block")
    with pytest.raises(TypeError, match="sampler must be a specdec Sampler, got 'block'"):
        certify_sampler("block")
    for other in (BlockSampler(), MODEL, SpeculativeGenerator):
        with pytest.raises(TypeError, match="generator must be the SpeculativeGenerator that"):
            certify_generator(other, PROMPTS)


TABLES = {
    "sizes": (3, "abc", [3], [(3, 1)], (4, 1, 36), {3: 1}),
    "trees": (3, "abc", [3], (-1, -1)),
    "paths": (3, "abc", [3], ((5,),), (3, 2)),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, all in TABLES.items() for v in all])
def test_small_problems_are_named_by_tuples(name, value):
    with pytest.raises(TypeError, match=f"{name} must be a tuple of .*, for instance .*; got "):
        certify(RejectionSampler(), **(FEW | {name: value}))


def test_sizes_may_be_lists_or_a_tensor():
    def said(sizes):  # of a lossy rule, which is tried no further, and of few problems
        few = {"trees": (), "progress": lambda batches: batches[:1]}
        return str(certify(TypicalSampler(), sizes=sizes, **few))

    usual = said(((3, 1, 2),))
    assert said([[3, 1, 2]]) == said(torch.tensor([[3, 1, 2]])) == usual


def test_progress_is_a_function(generator):
    for subject in ((BlockSampler(),), (generator, PROMPTS)):
        with pytest.raises(TypeError, match=r"progress must be a function .*tqdm.*got True"):
            certify(*subject, progress=True)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_shown_on_terminals_alone(monkeypatch, is_terminal):
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    monkeypatch.setitem(BAR.keywords, "delay", 0)
    monkeypatch.setattr(sys, "stderr", stream)
    certify(TypicalSampler(), sizes=((2, 1, 1),), trees=())
    assert ("%|" in stream.getvalue()) == is_terminal


def test_a_lossy_rule_is_not_told_how_to_be_lossless():
    said = str(certify(TypicalSampler(), sizes=((2, 1, 4),), trees=()))
    assert said.startswith("LOSSY")
    assert "usual causes" not in said
    assert "a lossless rule accepts" not in " ".join(said.split())


WRONG = [
    ("must be a tensor or a sequence of numbers.*'adapter'", {"row_inputs": {"x": ["a", "b"]}}),
    (r"nobody reads row_inputs\['x'\]; known are", {"row_inputs": {"x": [1, 2]}}),
    ("settings must be a list of options.*3 names no option", {3: 1}),
]


@pytest.mark.parametrize(("message", "settings"), WRONG)
def test_settings_that_nobody_reads_are_refused(generator, message, settings):
    with pytest.raises(TypeError, match=message):
        certify(generator, PROMPTS, settings=[settings], **QUICK)


def test_token_healing_says_to_leave_it_out(generator):
    with pytest.raises(TypeError, match=r"heal_tokens\(.*\), and leave token_healing out"):
        generator.generate(torch.tensor([PROMPTS[0]]), token_healing=False, max_new_tokens=2)
