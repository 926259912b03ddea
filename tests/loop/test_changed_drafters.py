"""The draft length of a drafter, a call and a generation: what is set holds for what begins next,
and for nothing under way. So do the data types of a head's weights.
"""

import copy

import pytest
import torch
from architectures import VOCAB
from drafter_table import MODEL, make
from drafting import ragged_prompts

from specdec import SpeculativeGenerator, evaluate

PROMPTS = ragged_prompts(VOCAB, 5, 2, 9)
OPTIONS = {"do_sample": True, "top_k": 9, "seed": [1, 2, 3], "eos_token_id": None}

HEADS = [("p-eagle", False), ("mtp, looped", False), ("own", False), ("eagle3", True)]
OTHERS = [("model", False), ("lookup", False), ("suffix", True)]


def generator_of(name, num_draft_tokens, **options):
    return SpeculativeGenerator(MODEL, make(name, num_draft_tokens), **options)


def plain(rows):
    return [[vars(step) for step in row] for row in rows]


def steps_of(generator, room, **options):
    """What every step of every row did."""
    return plain(generator.generate(*PROMPTS, max_new_tokens=room, **OPTIONS, **options).steps)


@pytest.mark.parametrize(("name", "graphs"), [*OTHERS, *HEADS])
def test_another_number_of_draft_tokens_holds_from_the_next_call_on(name, graphs):
    """Also where a call leaves room for one draft token alone; a generation under way goes on with
    the number that it began with.
    """
    few, more = (generator_of(name, k) for k in (1, 4))
    generator = generator_of(name, 1, graphs=graphs)
    generation, other = (g.start(*PROMPTS, max_new_tokens=40, **OPTIONS) for g in (generator, few))
    for room, expected in ((12, few), (12, more), (2, more), (12, few)):
        generator.drafter.num_draft_tokens = expected.drafter.num_draft_tokens
        assert steps_of(generator, room) == steps_of(expected, room)
        found, wanted = (
            g.step(call).fetch().read() for g, call in ((generator, generation), (few, other))
        )
        assert plain([found]) == plain([wanted])


@pytest.mark.parametrize("graphs", [False, True])
def test_a_call_drafts_as_many_tokens_as_it_asks_for(graphs):
    generator = generator_of("model", 4, graphs=graphs)
    for count in (2, 0, None):
        most = 4 if count is None else count
        expected = generator_of("model", most)
        assert steps_of(generator, 17, num_draft_tokens=count) == steps_of(expected, 17)
        assert generator.last_result.stats.to_dict() == expected.last_result.stats.to_dict()
        options = OPTIONS | {"max_new_tokens": 17, "num_draft_tokens": count}
        records = list(generator.stream(*PROMPTS, **options))
        of_row = [record.rows[0] for record in records if record.rows[0]]
        assert plain([of_row]) == plain(expected.last_result.steps[:1])
    assert generator.drafter.num_draft_tokens == 4
    generation = generator.start(*PROMPTS, max_new_tokens=17, **OPTIONS, num_draft_tokens=2)
    assert generator.step(generation).draft.tokens.shape == (3, 2)
    generation.num_draft_tokens = 4
    assert generator.step(generation).draft.tokens.shape == (3, 4)


def test_an_evaluation_passes_it_on():
    options = {"max_new_tokens": 12, "eos_token_id": None}
    found = evaluate(generator_of("model", 4), *PROMPTS, **options, num_draft_tokens=2)
    expected = evaluate(generator_of("model", 2), *PROMPTS, **options)
    assert [plain([r.steps]) for r in found.rows] == [plain([r.steps]) for r in expected.rows]


@pytest.mark.parametrize(("name", "graphs"), HEADS)
def test_a_head_that_was_cast_drafts_from_the_next_call_on(name, graphs):
    drafter = copy.deepcopy(make(name, 3))
    generator = SpeculativeGenerator(MODEL, drafter, graphs=graphs)
    steps_of(generator, 12)
    for dtype in (torch.bfloat16, torch.float64):
        cast = copy.deepcopy(drafter).to(dtype)
        drafter.to(dtype)
        expected = steps_of(SpeculativeGenerator(MODEL, cast), 12)
        assert steps_of(generator, 12) == expected


NUMBERS = [("model", -1), ("model", True), ("model", 2.0), ("model", None), ("dflash", 9)]


@pytest.mark.parametrize(("name", "number"), NUMBERS)
def test_a_number_that_cannot_be_drafted_is_refused_when_a_call_begins(name, number):
    """9 is more than a block predicts. What was there before is as it was."""
    generator = generator_of(name, 4, graphs=True)
    generation = generator.start(*PROMPTS, max_new_tokens=30, **OPTIONS)
    expected, kept = steps_of(generator, 30), list(generator._storages)
    generator.drafter.num_draft_tokens = number
    for call in (generator.start, generator.stream, generator.generate):
        with pytest.raises((TypeError, ValueError), match=r"num_draft_tokens|blocks of 6 rows"):
            call(*PROMPTS, max_new_tokens=30, **OPTIONS)
    generator.step(generation)  # began with 4
    generator.drafter.num_draft_tokens = 4
    for value in (5, -1, True, 2.0):
        with pytest.raises((TypeError, ValueError), match="num_draft_tokens"):
            generator.start(*PROMPTS, max_new_tokens=9, **OPTIONS, num_draft_tokens=value)
        with pytest.raises((TypeError, ValueError), match="num_draft_tokens"):
            generation.num_draft_tokens = value
    assert list(generator._storages) == kept
    assert steps_of(generator, 30) == expected
