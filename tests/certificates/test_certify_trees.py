"""`certify` on generators that draft trees."""

from dataclasses import replace

import pytest
from drafter_table import MODEL, TREES, make
from test_certify_runs import QUICK
from text_laws import DRAFT, PROMPT, TARGET, tiny

from specdec import (
    BlockSampler,
    CouplingSampler,
    ModelDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    certify,
)
from specdec.drafters.tree import Tree

TREE = Tree(nodes=6, depth=3, top_k=2, rates=(0.6, 0.3, 0.2))
SAMPLERS = [RejectionSampler(), BlockSampler(), CouplingSampler()]
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: type(s).__name__)


@each_sampler
def test_a_generator_that_drafts_trees_passes(sampler):
    generator = SpeculativeGenerator(tiny(TARGET), ModelDrafter(tiny(DRAFT), tree=TREE), sampler)
    report = certify(generator, [PROMPT, [3]], **QUICK | {"num_samples": 32})
    assert report.passed, report
    assert report.rows.num_steps > 100
    assert not report.rows.differences


@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
@each_sampler
def test_every_drafter_of_trees_passes(name, sampler):
    report = certify(SpeculativeGenerator(MODEL, make(name), sampler), [PROMPT, [3]], **QUICK)
    assert report.passed, report


class Chosen(ModelDrafter):
    """Children are the likeliest of what was left, and said to be drawn from it."""

    def propose(self, context, state, drawing):
        draft = super().propose(context, state, drawing)
        return draft if draft.probs is None else replace(draft, tokens=draft.probs.argmax(dim=-1))


def test_children_that_are_chosen_and_not_drawn_are_found_by_the_law_alone():
    drafter = Chosen(tiny(DRAFT), tree=Tree(nodes=2, depth=1, top_k=2))
    generator = SpeculativeGenerator(tiny(TARGET), drafter, RejectionSampler())
    report = certify(generator, [PROMPT], **QUICK)
    assert not report.text.passed
    assert all(part.passed for part in (report.greedy, report.noise, report.rows))
