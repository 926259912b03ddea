"""Probabilities before temperature and truncation: what target and drafter are sure of in greedy
rows, where the sampler compares 0 and 1.
"""

import math

import pytest
import torch
from drafter_table import MODEL, make

from specdec import FirstMatch, PromptLookupDrafter, SpeculativeGenerator, Tree
from specdec.drafters.paths import Paths
from specdec.lab.trace import Trace

PROMPTS = torch.tensor([[5, 6, 7, 8], [9, 3, 2, 11]])
OPTIONS = [{}, {"temperature": [0.0, 0.7], "top_k": 5, "seed": [1, 2]}]


def by_hf(prompt, step_tokens):
    """HF's softmax of what follows a text."""
    ids = torch.tensor([prompt + step_tokens])
    return MODEL(ids).logits[0, -1].double().softmax(dim=-1)


@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "mixed"])
@pytest.mark.parametrize("name", ["model", "eagle3", "mtp, looped", "lookup", "p-eagle, tree"])
def test_raw_probabilities_of_the_target_are_those_of_hf(name, options):
    generator = SpeculativeGenerator(MODEL, make(name))
    result = generator.generate(PROMPTS, max_new_tokens=8, trace=True, **options)
    for record in result.trace.to_records():
        if record["new_token"] is None:
            continue
        text = result.new_tokens[record["row"]].tolist()
        before = text[: record["position"] - PROMPTS.shape[1]]
        probs = by_hf(PROMPTS[record["row"]].tolist(), before)
        expected = float(probs[record["new_token"]])
        assert record["new_raw_target_prob"] == pytest.approx(expected, abs=1e-5)
        entropy = float(-(probs * probs.log()).sum())
        assert record["target_entropy"] == pytest.approx(entropy, abs=1e-4)


def test_a_greedy_drafter_keeps_its_own_confidence():
    generator = SpeculativeGenerator(MODEL, make("itself"))
    records = generator.generate(PROMPTS, max_new_tokens=8, trace=True).trace.to_records()
    drafted = [r for r in records if r["draft_token"] is not None]
    assert drafted
    for record in drafted:  # it is the target
        assert record["draft_prob"] == 1
        assert 0 < record["raw_draft_prob"] < 1
        assert record["raw_draft_prob"] == pytest.approx(record["raw_target_prob"], abs=1e-5)
    lookup = SpeculativeGenerator(MODEL, make("lookup"))
    records = lookup.generate(PROMPTS, max_new_tokens=8, trace=True).trace.to_records()
    assert {record["raw_draft_prob"] for record in records} == {None}


SHAPES = {
    "dynamic or drawn": Tree(nodes=6, depth=3, top_k=3, rates=(0.6, 0.5, 0.4)),
    "ranks": Tree(ranks=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))),
    "paths": Paths(2, 3),
}


@pytest.mark.parametrize("kind", ["sample", "argmax"])
@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "mixed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_nodes_of_trees_have_the_drafters_own_probability(shape, options, kind):
    """Of a target that drafts for itself it is the target's, whatever was drawn before among the
    siblings.
    """
    drafter = make("itself", tree=SHAPES[shape], proposal=kind)
    generator = SpeculativeGenerator(MODEL, drafter, "gbv" if shape == "paths" else "auto")
    records = generator.generate(PROMPTS, max_new_tokens=8, trace=True, **options).trace
    drafted = [r for r in records.to_records() if r["draft_token"] is not None]
    assert len({(r["row"], r["step"]) for r in drafted}) < len(drafted)
    for record in drafted:
        assert record["raw_draft_prob"] == pytest.approx(record["raw_target_prob"], abs=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "mixed"])
def test_of_joined_drafters_each_row_has_those_of_the_one_that_drafted(options):
    """No prompt repeats anything, so lookup finds nothing in the first step, and something later:
    where the first drafter drafts, there are no probabilities.
    """
    own = make("itself", 3), FirstMatch(PromptLookupDrafter(2), make("itself", 3))
    found, prompts = [], torch.tensor([[5, 6, 7, 8], [9, 3, 9, 3]])
    for drafter in own:
        call = {"max_new_tokens": 3, "trace": True, **options}
        trace = SpeculativeGenerator(MODEL, drafter).generate(prompts, **call).trace
        found.append([row[0].raw_draft_probs for row in trace.numbers])
    assert found[1][0] == found[0][0] is not None
    assert found[1][1] is None


def test_raw_probabilities_are_saved_and_shown(tmp_path):
    generator = SpeculativeGenerator(MODEL, make("model"))
    trace = generator.generate(PROMPTS, max_new_tokens=6, trace=True).trace
    trace.to_jsonl(tmp_path / "trace.jsonl")
    assert Trace.from_jsonl(tmp_path / "trace.jsonl").to_records() == trace.to_records()
    trace.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for name in ("new_raw_target_prob", "raw_draft_prob", "before temperature"):
        assert name in page
    assert not any(math.isnan(r["new_raw_target_prob"] or 0) for r in trace.to_records())
