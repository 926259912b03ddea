"""Drafters over the target's own keys and values: the laws, for what an author would write."""

import pytest
from architectures import VOCAB, build
from diagonal import diagonal
from drafting import ragged_prompts
from target_readers import LayerDrafter, QueryDrafter

from specdec import FirstMatch, PromptLookupDrafter, SpeculativeGenerator, Target

LENGTHS, NUM_NEW = (1, 4, 6, 9), 24
BATCH, MASK = ragged_prompts(VOCAB, *LENGTHS)
HALF, QUERIES = "half of the layers", "queries over the last layer"
KINDS = {
    HALF: lambda target: LayerDrafter(target, range(0, target.num_layers, 2)),
    QUERIES: QueryDrafter,
}
MODELS = ["llama", "gemma3", "llama4"]


def generator_of(kind, model, sampler="auto", **options):
    target = Target(build(model))
    return SpeculativeGenerator(target, KINDS[kind](target), sampler, **options)


@pytest.mark.parametrize(
    ("kind", "model", "graphs"),
    [
        *diagonal([HALF], MODELS, [False, True]),
        *diagonal([QUERIES], MODELS, [True, False]),
    ],
)
def test_greedy_text_is_that_of_hf_in_ragged_batches_and_alone(kind, model, graphs):
    generator = generator_of(kind, model, graphs=graphs)
    options = {"max_new_tokens": NUM_NEW, "do_sample": False}
    text = build(model).generate(BATCH, attention_mask=MASK, pad_token_id=0, **options)
    result = generator.generate(BATCH, MASK, pad_token_id=0, **options)
    assert result.sequences.tolist() == text.tolist()
    alone = generator.generate(BATCH[:1, -1:], **options)
    assert alone.sequences[0].tolist() == text[0, -1 - NUM_NEW :].tolist()
    assert [*map(vars, alone.steps[0])] == [*map(vars, result.steps[0])]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_from_which_nothing_is_hidden_accepts_all(model, graphs):
    """The perfect control: the whole target behind the text, at every length of a draft."""
    target = Target(build(model))
    drafter = LayerDrafter(target, range(target.num_layers))
    generator = SpeculativeGenerator(target, drafter, graphs=graphs, prefill_chunk_size=3)
    generation = generator.start(BATCH, MASK, max_new_tokens=60, do_sample=True, seed=[1, 2, 3, 4])
    for length in (4, 1, 0, 3, 4, 2):
        generation.num_draft_tokens = length
        rows = generator.step(generation).fetch().read()
        assert [row.num_accepted for row in rows] == [length] * 4


class OneTooFar(LayerDrafter):
    """Begins a slot behind the root's: a hole, which holds what an earlier step has left."""

    def propose(self, context, state, drawing):
        context.target.__dict__["lengths"] = context.target.lengths + 1
        return super().propose(context, state, drawing)


@pytest.mark.parametrize("place", ["prefill", "propose"])
def test_who_reads_the_target_unasked_is_told_to_ask(place):
    class Forgot(LayerDrafter):
        reads_target = False

        def prefill(self, context, state):
            if place == "prefill":
                context.target.keys_values(0)

    class Broken(LayerDrafter):
        """An error of its own stays what it is."""

        reads_target = False

        def propose(self, context, state, drawing):
            return None.lengths_of_mine

    target = Target(build("llama"))
    with pytest.raises(TypeError, match=r"Forgot reads context\.target\.\w+, .*None.*reads_target"):
        SpeculativeGenerator(target, Forgot(target, [0])).generate(BATCH, MASK, max_new_tokens=4)
    with pytest.raises(AttributeError, match="lengths_of_mine"):
        SpeculativeGenerator(target, Broken(target, [0])).generate(BATCH, MASK, max_new_tokens=4)


def test_the_control_notices_a_draft_that_begins_elsewhere():
    target = Target(build("llama"))
    generator = SpeculativeGenerator(target, OneTooFar(target, range(target.num_layers)))
    result = generator.generate(BATCH, MASK, max_new_tokens=40, do_sample=True, seed=[1, 2, 3, 4])
    assert result.stats.acceptance_rate < 0.9


def test_a_recurrent_target_is_refused_by_name():
    target = Target(build("qwen3_5"))
    with pytest.raises(ValueError, match="keeps a recurrent state"):
        SpeculativeGenerator(target, LayerDrafter(target, range(target.num_layers)))


def test_layers_and_offsets_that_do_not_exist_are_refused():
    target = Target(build("llama"))
    with pytest.raises(ValueError, match="layers must be"):
        target.part([0, 99])
    drafter = LayerDrafter(target, [0])
    drafter.propose = lambda context, state, drawing: context.target.forward(
        target, context.tokens[:, :1], offset=-1
    )
    with pytest.raises(ValueError, match="offset must be"):
        SpeculativeGenerator(target, drafter).generate(BATCH[1:2, -4:], max_new_tokens=4)
    drafter.reads_target = "yes"
    with pytest.raises(TypeError, match="reads_target must be True or False"):
        SpeculativeGenerator(target, drafter)


class WideDrafter(LayerDrafter):
    """Reads a window of `width` tokens behind the text in every step, and drafts by the first."""

    def __init__(self, target, width, **kind):
        super().__init__(target, range(target.num_layers), 2, **kind)
        self.width = width

    def propose(self, context, state, drawing):
        tokens = context.tokens.gather(1, context.num_new.clamp(min=0)[:, None])
        drafting = self.proposal.begin(drawing)
        for i in range(drawing.num_draft_tokens):
            window = tokens.expand(-1, self.width - i)  # the last slot is always the same
            logits, _ = context.target.forward(self._target, window, offset=i)
            tokens = drafting.draw(logits[:, :1])
        return drafting.end()


class WiderDrafter(WideDrafter):
    extra_slots = 70  # more than storage is rounded up by


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", [WideDrafter, WiderDrafter])
def test_a_window_behind_the_text_is_as_wide_as_the_drafter_says(kind, graphs):
    target = Target(build("llama"))
    plain = SpeculativeGenerator(target, None).generate(BATCH, MASK, max_new_tokens=9).sequences
    most = 2 + 1 + kind.extra_slots
    generator = SpeculativeGenerator(target, kind(target, most), graphs=graphs)
    result = generator.generate(BATCH, MASK, max_new_tokens=9)
    assert result.sequences.equal(plain)
    assert result.stats.acceptance_rate == 1  # all of the window was attended to, and nothing more
    generator = SpeculativeGenerator(target, kind(target, most + 1), graphs=graphs)
    with pytest.raises(ValueError, match=rf"a row has {most} there: K \+ 1, and the drafter's ext"):
        generator.generate(BATCH, MASK, max_new_tokens=9)


def test_extra_slots_are_a_number():
    target = Target(build("llama"))
    drafter = WideDrafter(target, 3)
    for wrong, error in ((-1, ValueError), (1.5, TypeError), (None, TypeError)):
        drafter.extra_slots = wrong
        with pytest.raises(error, match=r"WideDrafter\.extra_slots must be an integer >= 0"):
            SpeculativeGenerator(target, drafter)


def test_a_joined_drafter_has_the_extra_slots_of_the_one_that_needs_most():
    target = Target(build("llama"))
    joined = FirstMatch(PromptLookupDrafter(3, min_ngram=3), WiderDrafter(target, 73))
    found = SpeculativeGenerator(target, joined).generate(BATCH, MASK, max_new_tokens=9)
    plain = SpeculativeGenerator(target, None).generate(BATCH, MASK, max_new_tokens=9)
    assert found.sequences.equal(plain.sequences)
