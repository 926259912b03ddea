"""`certify(generator, prompts)` says of drafts whether they are those of a drafter without state.

All texts here are lossless and greedy text is HF's: the drafts alone are wrong.
"""

import pytest
import torch
from architectures import VOCAB
from diagonal import first
from drafter_table import CHAINS, MODEL, ONE_OF_EACH, READERS, make
from drafting import perturbed

from specdec import ModelDrafter, SpeculativeGenerator
from specdec.drafters import WrappedDrafter
from specdec.graphs.tree import fill
from specdec.lab.certificates.generator.drafts import audit_drafts

PROMPTS = [torch.arange(n).mul(7).remainder(VOCAB).tolist() for n in (9, 1, 2)]
OTHERS = [name for name in CHAINS if name not in READERS]


def audit(drafter):
    return audit_drafts(SpeculativeGenerator(MODEL, drafter), PROMPTS, 24)


@pytest.mark.parametrize("name", first(OTHERS, [n for n in ONE_OF_EACH if n in OTHERS]))
def test_a_sound_drafter_drafts_the_same_without_state(name):
    drafter = make(name)
    found = audit(drafter)
    if drafter.has_memory:
        assert found is None
        return
    assert found.num_drafts > 12
    assert found.num_other == 0
    assert found.accepted == found.accepted_anew
    assert "anew" in str(found)


class Emptied(WrappedDrafter):
    """The state is cleared whenever a step has accepted nothing."""

    def propose(self, context, state, drawing):
        draft = super().propose(context, state, drawing)
        if (context.num_new == 1).all():
            fill(state, 0)
        return draft


def test_drafts_of_a_state_that_was_cleared_are_found():
    found = audit(Emptied(ModelDrafter(perturbed(MODEL), 4)))
    assert not found.passed
    assert found.num_other > 2
    assert "look at the drafter's prefill" in str(found)


def test_a_generator_that_brings_wrong_features_is_found(monkeypatch):
    """The text by HF's own forward has the right ones."""
    generator = SpeculativeGenerator(MODEL, make("eagle3"))
    read = generator.target.__class__.prefill

    def late(target, *args, **kwargs):
        return read(target, *args, **kwargs).roll(1, dims=1)

    monkeypatch.setattr(generator.target.__class__, "prefill", late)
    assert not audit_drafts(generator, PROMPTS[:1], 24).passed


@pytest.mark.parametrize("name", ["model, tree", "self, top"])
def test_where_the_definition_has_no_such_drafter_nothing_is_said(name):
    assert audit(make(name)) is None
