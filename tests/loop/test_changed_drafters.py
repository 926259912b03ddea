"""What is set on a drafter between calls holds for the next call, and for no call under way."""

import copy

import mask_heads
import mtp_heads
import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from eagle_heads import head_for
from toy_mask_token import ToyDrafter, new_head

from specdec import (
    EagleDrafter,
    MaskTokenDrafter,
    ModelDrafter,
    MTPDrafter,
    PromptLookupDrafter,
    SpeculativeGenerator,
)

MODEL = build("llama")
DRAFT = perturbed(MODEL)
HEADS = {
    "eagle": lambda k: EagleDrafter(head_for(MODEL), MODEL, k),
    "p-eagle": lambda k: MaskTokenDrafter(mask_heads.head_for(MODEL, "p-eagle"), MODEL, k),
    "pard": lambda k: MaskTokenDrafter(mask_heads.head_for(MODEL, "pard"), MODEL, k),
    "dflash": lambda k: MaskTokenDrafter(mask_heads.head_for(MODEL, "dflash"), MODEL, k),
    "mtp": lambda k: MTPDrafter(mtp_heads.head_for(MODEL), MODEL, k),
    "mtp, looped": lambda k: MTPDrafter(mtp_heads.head_for(MODEL, num_depths=2), MODEL, k),
    "own": lambda k: ToyDrafter(new_head(MODEL), MODEL, k),
}
DRAFTERS = HEADS | {
    "model": lambda k: ModelDrafter(DRAFT, k),
    "lookup": lambda k: PromptLookupDrafter(k, max_ngram=2),
}
PROMPTS = ragged_prompts(VOCAB, 5, 2, 9)
OPTIONS = {"do_sample": True, "top_k": 9, "seed": [1, 2, 3], "eos_token_id": None}

EAGER = [(name, False) for name in DRAFTERS]
with_graphs = pytest.mark.parametrize(("name", "graphs"), [*EAGER, ("eagle", True), ("mtp", True)])


def steps_of(generator, room):
    """What every step of every row did."""
    result = generator.generate(*PROMPTS, max_new_tokens=room, **OPTIONS)
    return [[vars(step) for step in row] for row in result.steps]


@with_graphs
def test_another_number_of_draft_tokens_holds_from_the_next_call_on(name, graphs):
    """Also where a call leaves room for one draft token alone."""
    few, more = (SpeculativeGenerator(MODEL, DRAFTERS[name](k)) for k in (1, 4))
    generator = SpeculativeGenerator(MODEL, DRAFTERS[name](1), graphs=graphs)
    for room, other in ((20, few), (20, more), (2, more), (20, few)):
        generator.drafter.num_draft_tokens = other.drafter.num_draft_tokens
        assert steps_of(generator, room) == steps_of(other, room)


@with_graphs
def test_a_generation_under_way_goes_on_with_the_number_that_it_began_with(name, graphs):
    generator = SpeculativeGenerator(MODEL, DRAFTERS[name](3), graphs=graphs)
    generation, other = (generator.start(*PROMPTS, max_new_tokens=40, **OPTIONS) for _ in range(2))
    for k in (3, 1, 5, 0, 2, 4):
        expected = generator.step(other).record.clone()
        generator.drafter.num_draft_tokens = k
        assert generator.step(generation).record.equal(expected)
        generator.drafter.num_draft_tokens = 3


@pytest.mark.parametrize(("name", "graphs"), [*((n, False) for n in HEADS), ("eagle", True)])
def test_a_head_that_was_cast_drafts_from_the_next_call_on(name, graphs):
    drafter = HEADS[name](3)
    generator = SpeculativeGenerator(MODEL, drafter, graphs=graphs)
    steps_of(generator, 12)
    for dtype in (torch.bfloat16, torch.float64):
        cast = copy.deepcopy(drafter).to(dtype)
        drafter.to(dtype)
        expected = steps_of(SpeculativeGenerator(MODEL, cast), 12)
        assert steps_of(generator, 12) == expected


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_more_draft_tokens_than_a_block_predicts_are_refused_when_a_call_begins(name):
    drafter = MaskTokenDrafter(mask_heads.head_for(MODEL, name), MODEL, 4)
    generator = SpeculativeGenerator(MODEL, drafter, graphs=True)
    generation = generator.start(*PROMPTS, max_new_tokens=30, **OPTIONS)
    expected = steps_of(generator, 30)
    kept = list(generator._runners)
    drafter.num_draft_tokens = 9
    for call in (generator.start, generator.stream, generator.generate):
        with pytest.raises(ValueError, match=r"blocks of 6 rows.*at most [56], got 9"):
            call(*PROMPTS, max_new_tokens=30, **OPTIONS)
    assert list(generator._runners) == kept
    generator.step(generation)  # began with 4
    drafter.num_draft_tokens = 4
    assert steps_of(generator, 30) == expected


def test_a_number_of_draft_tokens_that_is_none_is_refused_when_a_call_begins():
    generator = SpeculativeGenerator(MODEL, DRAFTERS["model"](2))
    expected = steps_of(generator, 9)
    for value, error in ((-1, ValueError), (True, TypeError), (2.0, TypeError), (None, TypeError)):
        generator.drafter.num_draft_tokens = value
        with pytest.raises(error, match="num_draft_tokens"):
            generator.generate(*PROMPTS, max_new_tokens=9, **OPTIONS)
    generator.drafter.num_draft_tokens = 2
    assert steps_of(generator, 9) == expected
