"""What is chosen for speed: implementations of experts inside a step, fused pointwise work.

The user's model is never touched, and prompts are read by its own experts.
"""

import copy
import pickle
import random
from functools import partialmethod

import pytest
import torch
from architectures import VOCAB, build
from diagonal import first
from drafting import perturbed, ragged_prompts
from fingerprint import fingerprint
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from specdec import ModelDrafter, PromptLookupDrafter, SpeculativeGenerator, Target
from specdec.graphs import no_host_sync
from specdec.graphs.capture import CaptureError
from specdec.targets.edits import experts
from specdec.targets.edits.experts import StepExperts
from specdec.targets.edits.fusion import Fusion

IDS, MASK = ragged_prompts(VOCAB, 5, 1, 9)
OPTIONS = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(name="on_a_gpu")
def _on_a_gpu(monkeypatch):
    """Experts are chosen as for a GPU on which grouped products loop on the host."""

    def of(model):
        own = model.config._experts_implementation
        chosen = experts.choose(own, model.dtype, (9, 0))
        return (None if chosen == own else StepExperts(chosen)), f"experts: {chosen}"

    monkeypatch.setattr(StepExperts, "of", of)


@pytest.mark.parametrize(
    ("own", "dtype", "capability", "expected"),
    [
        ("eager", torch.bfloat16, (9, 0), "grouped_mm"),
        ("eager", torch.bfloat16, (8, 0), "batched_mm"),
        ("eager", torch.float16, (9, 0), "batched_mm"),
        ("grouped_mm", torch.float32, (9, 0), "batched_mm"),
        ("grouped_mm", torch.bfloat16, (10, 0), "grouped_mm"),
        ("batched_mm", torch.bfloat16, (9, 0), "batched_mm"),
        ("deepgemm", torch.bfloat16, (9, 0), "deepgemm"),
    ],
)
def test_experts_are_run_by_what_does_not_wait(own, dtype, capability, expected):
    assert experts.choose(own, dtype, capability) == expected


def test_a_model_on_a_cpu_keeps_its_own_experts():
    assert StepExperts.of(build("qwen3_moe")) == (None, None)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_mixture_that_waits_is_captured_with_other_experts(name, on_a_gpu, monkeypatch):
    model = build(name)
    model.set_experts_implementation("eager")
    plain = copy.deepcopy(model)
    before = fingerprint(model)
    used = []
    batched = ALL_EXPERTS_FUNCTIONS["batched_mm"]

    def spy(module, hidden, *args):
        used.append(hidden.shape[0])
        return batched(module, hidden, *args)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, "batched_mm", spy)
    generator = SpeculativeGenerator(model, PromptLookupDrafter(3), graphs=True)
    used.clear()  # of the self-test
    found = generator.generate(IDS, MASK, **OPTIONS, check=True)
    assert found.sequences.equal(plain.generate(IDS, attention_mask=MASK, **OPTIONS))
    assert set(used) == {4 * 4}  # windows of a bucket of four rows; no chunk of a prompt
    assert "experts: batched_mm" in generator.explain()
    assert fingerprint(model) == before
    assert model.config._experts_implementation == "eager"


def test_without_another_implementation_a_mixture_that_waits_is_refused():
    model = build("mixtral")
    model.set_experts_implementation("eager")
    with pytest.raises(CaptureError, match=r"modeling_mixtral|moe"):
        SpeculativeGenerator(model, None, graphs=True).generate(IDS, MASK, **OPTIONS)


def test_experts_that_break_a_model_are_not_used_and_explain_says_so(on_a_gpu, monkeypatch):
    def broken(module, hidden, *args):
        return hidden * 0

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, "batched_mm", broken)
    model = build("mixtral")
    generator = SpeculativeGenerator(model, None)
    assert "experts are the model's own: with batched_mm" in generator.explain()
    assert generator.generate(IDS, MASK, **OPTIONS).sequences.equal(text(build("mixtral")))


def compile_with(backend, monkeypatch):
    """Fused regions are compiled by something else than Inductor."""
    monkeypatch.setattr(Fusion, "__init__", partialmethod(Fusion.__init__, backend))


def text(model, drafter=None):
    return SpeculativeGenerator(model, drafter).generate(IDS, MASK, **OPTIONS).sequences


@pytest.fixture(name="calls")
def _calls(monkeypatch):
    """Fused regions are traced and run without Inductor; what ran is noted."""
    calls = []

    def backend(graph, example_inputs):
        def run(*args):
            calls.append(len(args))
            return graph(*args)

        return run

    compile_with(backend, monkeypatch)
    return calls


FUSED = {
    "llama": {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention"},
    "cohere2": {"Cohere2LayerNorm", "Cohere2MLP", "Cohere2Attention"},
    "qwen3_moe": {"Qwen3MoeRMSNorm", "Qwen3MoeAttention"},
    "stablelm": {"StableLmMLP", "StableLmAttention"},
}


@pytest.mark.parametrize("name", first(FUSED, ["llama"]))
def test_fused_work_is_that_of_the_model(name, calls):
    model = build(name)
    before = fingerprint(model)
    target = Target(model, fuse=True)
    assert target.is_fused
    (note,) = (note for note in target.notes if "fused" in note)
    assert set(note.removeprefix("pointwise work is fused in ").split(", ")) == FUSED[name]
    drafter = ModelDrafter(perturbed(model), 3)
    expected = text(model, drafter)
    calls.clear()
    assert text(target, drafter).equal(expected)
    assert calls
    assert fingerprint(model) == before


def test_prompts_and_steps_are_fused_and_a_watched_step_runs_as_it_is(calls):
    generator = SpeculativeGenerator(Target(build("llama"), fuse=True), None)
    calls.clear()
    generation = generator.start(IDS, MASK, **OPTIONS)
    assert calls
    calls.clear()
    generator.step(generation)
    assert calls
    calls.clear()
    with no_host_sync():
        generator.step(generation)
    assert not calls


@pytest.mark.parametrize("name", first(["gate_proj", "act_fn"], ["gate_proj"]))
def test_hooks_inside_of_a_compiled_module_run_though_they_came_later(name, calls):
    model = build("llama")
    generator = SpeculativeGenerator(Target(model, fuse=True), PromptLookupDrafter(3))
    before = generator.generate(IDS, MASK, **OPTIONS).sequences
    inner = getattr(model.model.layers[1].mlp, name)
    handle = inner.register_forward_hook(lambda module, args, out: -3 * out)
    expected = text(model)
    assert not expected.equal(before)
    assert generator.generate(IDS, MASK, **OPTIONS).sequences.equal(expected)
    handle.remove()
    assert generator.generate(IDS, MASK, **OPTIONS).sequences.equal(before)


@pytest.mark.parametrize("name", ["opt", "mpt", "gpt2"])
def test_a_model_with_nothing_to_fuse_runs_as_it_is_and_says_so(name, calls):
    target = Target(build(name), fuse=True)
    assert not target.is_fused
    assert "not fused" in SpeculativeGenerator(target, None).explain()


@pytest.mark.parametrize("fault", ["raises", "is wrong"])
def test_a_model_that_fusing_breaks_runs_as_it_is_and_says_why(fault, monkeypatch):
    def backend(graph, example_inputs):
        if fault == "raises":
            raise RuntimeError("no code for this")
        return lambda *args: [out * 1.5 for out in graph(*args)]

    compile_with(backend, monkeypatch)
    target = Target(build("llama"), fuse=True)
    assert not target.is_fused
    assert ("no code for this" if fault == "raises" else "differs") in target.notes[0]
    assert text(target).equal(text(build("llama")))


@pytest.mark.swept
def test_many_models_are_fused_one_after_the_other(calls):
    """Dynamo gives up on a function after some compilations of its code, here two, and compiles
    for every size of weights.
    """
    with torch._dynamo.config.patch(recompile_limit=2):
        for width in (16, 32, 48):
            model = build("llama", hidden_size=width, num_hidden_layers=1)
            assert Target(model, fuse=True).is_fused


def test_a_fused_target_is_copied_and_pickled(calls):
    target = Target(build("llama", num_hidden_layers=1), fuse=True)
    expected = text(target)
    for other in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        calls.clear()
        assert text(other).equal(expected)
        assert calls


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_inductors_code_passes_the_self_test_and_is_captured(name):
    target = Target(build(name), fuse=True)
    assert target.is_fused, target.notes
    generator = SpeculativeGenerator(target, PromptLookupDrafter(3), graphs=True)
    for _ in range(2):
        found = generator.generate(IDS, MASK, **OPTIONS, check=True)
        assert found.sequences.equal(text(build(name)))


@pytest.mark.parametrize("name", ["qwen3", pytest.param("phi3", marks=pytest.mark.slow)])
def test_after_the_first_call_of_a_signature_nothing_is_compiled(name, monkeypatch):
    compiled, met = [], set()

    def backend(graph, example_inputs):
        compiled.append([tuple(x.shape) for x in example_inputs if isinstance(x, torch.Tensor)])
        return graph

    compile_with(backend, monkeypatch)
    model, draws = build(name), random.Random(0)
    targets = Target(model, fuse=True), Target(model, fuse=True, feature_layers=(1,))
    assert targets[0].is_fused, targets[0].notes
    kinds = len(compiled)
    for call in range(8):
        k, num_rows = 3 if call % 3 else 0, (1, 3)[call % 2]
        ids, mask = ragged_prompts(VOCAB, *(draws.randint(1, 40) for _ in range(num_rows)))
        options = OPTIONS | {"max_new_tokens": draws.randint(5, 12)}
        before = len(compiled)
        loop = SpeculativeGenerator(targets[call % 2], PromptLookupDrafter(k), graphs=True)
        found = loop.generate(ids, mask, **options)
        if (k, num_rows) in met:
            assert len(compiled) == before, compiled[before:]
        met.add((k, num_rows))
        if call % 6 == 0:
            expected = SpeculativeGenerator(model, None).generate(ids, mask, **options)
            assert found.sequences.equal(expected.sequences)
    # Norms and MLPs for one row and for many; rotations for one row or many of one token or many.
    assert len(compiled) <= 2 * (kinds - 1) + 4
