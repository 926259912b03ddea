"""After `warm_up` the calls that it was for compile, capture and run eagerly nothing."""

from functools import partialmethod

import pytest
import torch
from architectures import VOCAB, build
from diagonal import first
from drafting import perturbed, ragged_prompts
from eagle_heads import head_for, informed
from refusals import refused

from specdec import (
    EagleDrafter,
    ModelDrafter,
    PromptLookupDrafter,
    SpeculativeGenerator,
    Target,
    Tree,
)
from specdec.graphs import Captured
from specdec.loop.replay import Replay
from specdec.targets.edits.fusion import Fusion

MODEL = build("llama", max_position_embeddings=512)
HEAD = head_for(MODEL, hidden_size=128, intermediate_size=256, has_embed_tokens=True)
DRAFTERS = {
    "none": lambda: None,
    "model": lambda: ModelDrafter(perturbed(MODEL), 3),
    "eagle": lambda: EagleDrafter(informed(MODEL, HEAD), MODEL, 3),
    "lookup": lambda: PromptLookupDrafter(3),
    "tree": lambda: ModelDrafter(perturbed(MODEL), tree=Tree(nodes=3, depth=2)),
}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0}
TOKENS = 400


def restless(acceptance, rows, tokens):
    """A draft length of every size."""
    return tokens * 7 % 4


@pytest.fixture(name="late")
def _late(monkeypatch):
    """What a GPU would do for the first time: captures, and what runs eagerly before them."""
    late = []
    for kind, name in ((Captured, "__init__"), (Replay, "_run_eagerly")):
        plain = getattr(kind, name)

        def noting(self, *args, plain=plain, name=name, **kwargs):
            late.append(name)
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(kind, name, noting)
    return late


def calls(generator, rows, **options):
    """Calls of many lengths, and of as few rows as share the captured ones'."""
    found = []
    for seed, longest in enumerate((1, 60, 70, 370)):
        num_rows = rows if seed % 2 else max(1, rows - 1)
        prompts = ragged_prompts(VOCAB, *[max(1, longest - 5 * i) for i in range(num_rows)])
        one = {"seed": list(range(num_rows))} if options.get("do_sample") else {}
        found.append(generator.generate(*prompts, max_new_tokens=20, **options, **one))
    return found


@pytest.mark.parametrize(
    ("drafter", "draft_length", "rows", "options"),
    [
        pytest.param("none", None, 1, {}, marks=pytest.mark.slow),
        pytest.param("model", None, 4, {}, marks=pytest.mark.slow),
        ("model", None, 1, {"num_draft_tokens": 2, **SAMPLED}),
        pytest.param("lookup", "auto", 1, {}, marks=pytest.mark.swept),
        pytest.param("eagle", None, 4, SAMPLED, marks=pytest.mark.slow),
        ("tree", restless, 4, SAMPLED),
    ],
)
def test_nothing_is_captured_in_calls_that_were_warmed_up(
    drafter, draft_length, rows, options, late
):
    part = DRAFTERS[drafter]()
    generator = SpeculativeGenerator(MODEL, part, graphs=True, draft_length=draft_length)
    generator.warm_up(rows, TOKENS, **options)
    assert late.count("__init__") >= 3  # a step, and chunks of 64 and 256 tokens
    late.clear()
    found = calls(generator, rows, eos_token_id=None, **options)
    assert not late
    if draft_length is None:
        plain = SpeculativeGenerator(MODEL, part, graphs=False)
        expected = calls(plain, rows, eos_token_id=None, **options)
        assert all(map(torch.equal, *([r.sequences for r in each] for each in (found, expected))))
    other = SAMPLED if "do_sample" not in options else {}
    calls(generator, rows, eos_token_id=None, **other)
    assert late  # of other options the steps are others


@pytest.mark.parametrize("graphs", first([True, False], []))
def test_nothing_is_compiled_in_calls_that_were_warmed_up(graphs, monkeypatch):
    compiled = []

    def backend(graph, example_inputs):
        compiled.append(graph)
        return graph

    monkeypatch.setattr(Fusion, "__init__", partialmethod(Fusion.__init__, backend))
    late = []
    for is_warm in (False, True):
        target = Target(build("llama", max_position_embeddings=512), fuse=True)
        head = EagleDrafter(informed(target.model, HEAD), target.model, 3)
        generator = SpeculativeGenerator(target, head, graphs=graphs)
        for rows in (1, 4):
            if is_warm:
                generator.warm_up(rows, TOKENS)
            compiled.clear()
            calls(generator, rows, eos_token_id=None)
            late.append(len(compiled))
    assert late[0] > 0  # one row is compiled for itself
    assert late[2:] == [0, 0]


def test_what_cannot_be_warmed_up_is_refused():
    generator = SpeculativeGenerator(MODEL, None, graphs=True, kept_bytes=1000)
    for message, size, options in [
        ("rows must be .. got 0", (0, 9), {}),
        ("tokens must be .. got 1", (1, 1), {}),
        ("max_new_tokens is part of tokens here; leave it out", (1, 9), {"max_new_tokens": 3}),
        ("a prompt of 1 tokens and 512 new tokens make 513 .. 512 positions", (1, 513), {}),
        ("kept_bytes is 1000, and the tensors of such calls take .. larger kept_bytes", (1, 9), {}),
    ]:
        with refused(message):
            generator.warm_up(*size, **options)
