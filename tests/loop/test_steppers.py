"""Steppers: one body of a step, wrapped by what times, compares, processes or counts steps."""

import gc
from functools import partial

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from specdec import ModelDrafter, SpeculativeGenerator

MODEL = build("llama")
PROMPTS = ragged_prompts(VOCAB, 5, 1, 9)
OPTIONS = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
PENALTY = {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])}


@pytest.fixture(name="generator")
def _generator():
    return SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL), 3))


@pytest.mark.parametrize("options", [{}, PENALTY], ids=["plain", "processors"])
def test_parts_of_a_step_are_marked_before_it_commits(generator, options):
    generation, seen = generator.start(*PROMPTS, **OPTIONS, **options), []
    buffer = generation.state.buffer

    def note(name):
        seen.append((name, buffer.root_position.tolist()))

    before = buffer.root_position.tolist()
    generation.stepper = partial(generation.stepper, mark=note)
    generator.step(generation)
    assert before != buffer.root_position.tolist()
    assert seen == [("draft", before), ("verify", before)]


@pytest.mark.parametrize("options", [{}, PENALTY], ids=["plain", "processors"])
def test_a_stepper_that_wraps_another_sees_every_step_and_changes_no_text(generator, options):
    expected = generator.generate(*PROMPTS, **OPTIONS, **options)
    generation, lengths = generator.start(*PROMPTS, **OPTIONS, **options), []
    stepper = generation.stepper

    def counting(state, num_draft_tokens):
        lengths.append(num_draft_tokens)
        return stepper(state, num_draft_tokens)

    generation.stepper = counting
    while not generation.has_ended.all():
        generator.step(generation)
    rows = zip(generation.tokens, generation.lengths, generation.request.lengths, strict=True)
    texts = torch.stack([row[start:end] for row, end, start in rows])
    assert texts.equal(expected.new_tokens)
    assert lengths == [3] * max(expected.stats.steps)


@pytest.mark.parametrize("wanted", [-1, 4])
def test_a_stepper_that_asks_for_more_than_there_is_room_for_is_told(generator, wanted):
    """Before any state is touched."""
    generation = generator.start(*PROMPTS, **OPTIONS)
    inner, before = generation.stepper, generation.state.buffer.root_position.tolist()
    generation.stepper = lambda state, num_draft_tokens: inner(state, wanted)
    with pytest.raises(ValueError, match=f"drafts 0 to 3 tokens, and {wanted} were asked for; a"):
        generator.step(generation)
    assert generation.state.buffer.root_position.tolist() == before


@pytest.mark.parametrize("options", [{"trace": True}, {"check": True}], ids=str)
def test_a_call_that_is_traced_or_checked_gives_its_tensors_back_without_the_collector(options):
    """Its stepper holds none of the generation, so that no circle keeps it."""
    drafter = ModelDrafter(perturbed(MODEL), 3)
    generator = SpeculativeGenerator(MODEL, drafter, graphs="check" in options)
    kept = []

    def stopping(ids, scores, **kwargs):
        kept.append(ids.shape[1])
        raise KeyboardInterrupt

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(KeyboardInterrupt):
            generator.generate(*PROMPTS, **OPTIONS, **options, stopping_criteria=[stopping])
        assert kept
        assert len(list(generator._storages)) == 1
    finally:
        gc.enable()


class Halving(SpeculativeGenerator):
    """Drafts half as much at every other step."""

    def step(self, generation):
        generation.num_draft_tokens = 3 if generation.num_draft_tokens == 1 else 1
        return super().step(generation)


def test_a_generators_own_step_is_taken_by_every_kind_of_call():
    texts = []
    for graphs, options in ((False, {}), (False, {"trace": True}), (True, {"check": True})):
        generator = Halving(MODEL, ModelDrafter(perturbed(MODEL), 3), graphs=graphs)
        result = generator.generate(*PROMPTS, **OPTIONS, **options)
        drafted = [[len(step.draft_tokens) for step in row] for row in result.steps]
        assert all(row == [1, 3] * (len(row) // 2) + [1] * (len(row) % 2) for row in drafted)
        texts.append(result.sequences.tolist())
    assert texts[0] == texts[1] == texts[2]
