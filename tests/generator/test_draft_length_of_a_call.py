"""`num_draft_tokens` of one call: the same as a drafter that was made with it."""

import pytest
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts

from specdec import ModelDrafter, SpeculativeGenerator, evaluate

MODEL = build("llama")
DRAFT = perturbed(MODEL)
PROMPTS = ragged_prompts(VOCAB, 5, 1, 9)
OPTIONS = {"max_new_tokens": 17, "eos_token_id": None, "do_sample": True, "seed": [1, 2, 3]}


def generator_of(num_draft_tokens, **options):
    return SpeculativeGenerator(MODEL, ModelDrafter(DRAFT, num_draft_tokens), **options)


def plain(rows):
    return [[vars(step) for step in row] for row in rows]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_call_drafts_as_many_tokens_as_it_asks_for(graphs):
    generator = generator_of(4, graphs=graphs)
    for count in (2, 4, 0, 3, None):
        most = 4 if count is None else count
        expected = generator_of(most).generate(*PROMPTS, **OPTIONS)
        result = generator.generate(*PROMPTS, **OPTIONS, num_draft_tokens=count, trace=not graphs)
        assert plain(result.steps) == plain(expected.steps)
        assert result.stats.to_dict() == expected.stats.to_dict()
        assert graphs or result.trace.about["num_draft_tokens"] == most
        records = list(generator.stream(*PROMPTS, **OPTIONS, num_draft_tokens=count))
        assert plain([[r.rows[0] for r in records if r.rows[0]]]) == plain(expected.steps[:1])
    assert generator.drafter.num_draft_tokens == 4


def test_a_generation_begins_with_the_number_of_its_call_and_may_take_more():
    generator = generator_of(4)
    generation = generator.start(*PROMPTS, **OPTIONS, num_draft_tokens=2)
    assert generator.step(generation).draft.tokens.shape == (3, 2)
    generation.num_draft_tokens = 4
    assert generator.step(generation).draft.tokens.shape == (3, 4)


def test_an_evaluation_passes_it_on():
    options = {"max_new_tokens": 12, "eos_token_id": None}
    found = evaluate(generator_of(4), *PROMPTS, **options, num_draft_tokens=2)
    expected = evaluate(generator_of(2), *PROMPTS, **options)
    assert [plain([row.steps]) for row in found.rows] == [
        plain([row.steps]) for row in expected.rows
    ]


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (5, ValueError, r"num_draft_tokens must be an integer in 0\.\.4, got 5; the drafter's own"),
        (-1, ValueError, "num_draft_tokens must be an integer >= 0, got -1"),
        (True, TypeError, "num_draft_tokens must be an integer"),
        (2.0, TypeError, "num_draft_tokens must be an integer"),
    ],
)
def test_a_number_that_the_drafter_cannot_draft_is_refused_before_anything_is_done(
    value, error, words, monkeypatch
):
    generator = generator_of(4)
    monkeypatch.setattr(generator, "_runners", None)  # nothing is taken from it
    for call in (generator.start, generator.stream, generator.generate):
        with pytest.raises(error, match=words):
            call(*PROMPTS, **OPTIONS, num_draft_tokens=value)
