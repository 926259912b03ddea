"""`certify` on trees: generators that draft them, and rules that decide on them by races, by
thresholds, or otherwise.
"""

from dataclasses import replace

import pytest
import torch
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
from specdec.kernels import draw
from specdec.samplers import Stream
from specdec.samplers.base import judge_points

TREE = Tree(nodes=6, depth=3, top_k=2, rates=(0.6, 0.3, 0.2))
SAMPLERS = [RejectionSampler(), BlockSampler(), CouplingSampler()]
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: type(s).__name__)


# Generators.


@each_sampler
def test_a_generator_that_drafts_trees_passes(sampler):
    generator = SpeculativeGenerator(tiny(TARGET), ModelDrafter(tiny(DRAFT), tree=TREE), sampler)
    report = certify(generator, [PROMPT, [3]], **QUICK)
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
        """The wrong tokens beside the probabilities."""
        draft = super().propose(context, state, drawing)
        return draft if draft.probs is None else replace(draft, tokens=draft.probs.argmax(dim=-1))


def test_children_that_are_chosen_and_not_drawn_are_found_by_the_law_alone():
    drafter = Chosen(tiny(DRAFT), tree=Tree(nodes=2, depth=1, top_k=2))
    generator = SpeculativeGenerator(tiny(TARGET), drafter, RejectionSampler())
    report = certify(generator, [PROMPT], **QUICK)
    assert not all(test.passed for test in report.tests)
    assert all(part.passed for part in (report.greedy, report.noise, report.rows))


# Rules.


def of_trees(batches):
    """Two of each kind: the shape without replacement of the most nodes, and one with it."""
    return [worlds for worlds in batches if worlds.parents in ((-1, 0, 0, -1), (-1, -1, 1))]


class MistakenRace(CouplingSampler):
    """Coupled sampling of trees with one mistake."""

    def __init__(self, mistake):
        super().__init__()
        self.mistake = mistake

    def accept(self, draft, target_logits, warp, noise):
        """A verdict, maybe with the wrong tokens."""
        if draft.parents is not None and self.mistake != "noise by index":
            noise = noise.at_depths(draft.depths)
        winners = noise.race(target_logits, warp, index=0)
        if self.mistake == "rows of other nodes":
            winners = winners.roll(1, dims=1)
        if self.mistake == "drafts pass where they are possible" and draft.parents is not None:
            rows = torch.arange(len(winners))[:, None]
            chance = warp(target_logits)[rows, draft.window_parents]
            likely = chance.gather(2, draft.tokens.clamp(min=0)[..., None])[..., 0]
            tokens = winners.gather(1, draft.window_parents)
            tokens = torch.where((likely > 0) & draft.is_valid, draft.tokens, tokens)
            winners = winners.scatter(1, draft.window_parents, tokens)
        return judge_points(draft, winners, target_logits.amax(dim=-1))


def test_a_race_over_trees_passes():
    report = certify(CouplingSampler(), progress=lambda batches: of_trees(batches)[1::3])
    assert report.passed, report
    assert report.is_exact
    assert report.num_worlds == 4 * 18
    assert report.deviation < 1e-14


@pytest.mark.parametrize(
    "mistake", ["noise by index", "rows of other nodes", "drafts pass where they are possible"]
)
def test_a_mistaken_race_over_trees_fails(mistake):
    report = certify(MistakenRace(mistake), progress=lambda batches: of_trees(batches)[:1])
    assert not report.passed
    assert {failure.kind for failure in report.failures} & {"law", "decision"}


class DrawAndCompare(RejectionSampler):
    """Lossless without thresholds: the target draws after every node, by the node's own uniform."""

    def __init__(self, is_late=False):
        super().__init__()
        self.is_late = is_late

    def accept(self, draft, target_logits, warp, noise):
        """A verdict of the right law, unless logits are those of the row before."""
        logits = target_logits.roll(1, dims=1) if self.is_late else target_logits
        width, last = draft.tokens.shape[1], noise.uniform(Stream.RESAMPLE)[:, :1]
        uniforms = torch.cat([last, noise.uniform(Stream.ACCEPT)[:, :width]], dim=1)
        return judge_points(draft, draw(warp(logits), uniforms), target_logits.amax(dim=-1))


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rule_that_compares_draws_on_trees_is_tested_by_draws(is_late):
    report = certify(
        DrawAndCompare(is_late), num_draws=4096, progress=lambda batches: of_trees(batches)[:2]
    )
    assert not report.is_exact
    assert report.passed is not is_late
