"""Steppers: one body of a step, wrapped by what times, compares, processes or counts steps."""

from functools import partial

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from specdec import ModelDrafter, SpeculativeGenerator
from specdec.loop.processors import step_with_processors
from specdec.loop.step import step

MODEL = build("llama")
PROMPTS = ragged_prompts(VOCAB, 5, 1, 9)
OPTIONS = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
PENALTY = {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])}


@pytest.fixture(name="generator")
def _generator():
    return SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL), 3))


def stepper_of(generation):
    """Eager, which passes `mark` on."""
    if generation.request.processors:
        return partial(step_with_processors, generation.request, generation.parts)
    return partial(step, generation.parts)


@pytest.mark.parametrize("options", [{}, PENALTY], ids=["plain", "processors"])
def test_every_part_of_a_step_is_marked_after_it(generator, options):
    generation, seen = generator.start(*PROMPTS, **OPTIONS, **options), []
    buffer = generation.state.buffer

    def note(name):
        seen.append((name, buffer.anchor_position.tolist()))

    before = buffer.anchor_position.tolist()
    generation.run_step(partial(stepper_of(generation), mark=note))
    after = buffer.anchor_position.tolist()
    assert before != after
    assert seen == [("draft", before), ("verify", before), ("accept", after)]


@pytest.mark.parametrize("options", [{}, PENALTY], ids=["plain", "processors"])
def test_a_stepper_that_wraps_another_sees_every_step_and_changes_no_text(generator, options):
    expected = generator.generate(*PROMPTS, **OPTIONS, **options)
    generation, lengths = generator.start(*PROMPTS, **OPTIONS, **options), []

    def counting(state, num_draft_tokens):
        lengths.append(num_draft_tokens)
        return generation.stepper(state, num_draft_tokens)

    while not generation.has_ended.all():
        outcome = generation.run_step(counting)
        assert (outcome.raw_logits is None) == (not options)
    rows = zip(generation.tokens, generation.lengths, generation.request.lengths, strict=True)
    texts = torch.stack([row[start:end] for row, end, start in rows])
    assert texts.equal(expected.new_tokens)
    assert lengths == [3] * max(expected.stats.steps)
