"""Laws 7 and 9 where the draft length changes from step to step, 0 among them.

Drafters that are always right have all of their tokens accepted, whatever the steps before have
drafted. Any drafter proposes what it would if the text so far were the prompt of a new call.
"""

from dataclasses import dataclass

import mask_heads
import mtp_heads
import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from eagle_heads import head_for
from eagle_oracle import VOCAB as ORACLE_VOCAB
from eagle_oracle import oracle_drafter
from hypothesis import given, settings
from hypothesis import strategies as st
from mtp_oracle import TARGET as ORACLE_TARGET
from mtp_oracle import oracle_drafter as mtp_oracle
from toy_mask_token import ToyDrafter, new_head

from specdec import (
    Draft,
    EagleDrafter,
    MaskTokenDrafter,
    ModelDrafter,
    MTPDrafter,
    NoDrafter,
    PromptLookupDrafter,
    SpeculativeGenerator,
)
from specdec.types import keep_rows

MODEL = build("llama")
MOST = 3
ROOM, LEARNED = 60, 24  # new tokens of a text, and how many of them heads know by heart
IDS, MASK = ragged_prompts(VOCAB, 8, 5)
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
TEXTS = MODEL.generate(IDS, attention_mask=MASK, max_new_tokens=ROOM + MOST, **GREEDY)
ROWS = [TEXTS[0], TEXTS[1, 3:]]


@dataclass(frozen=True)
class Shown:
    """`[B, S]`: the tokens that a drafter was shown, by position; -1 where it was shown none."""

    tokens: torch.Tensor

    def keep(self, rows):
        return Shown(keep_rows(self.tokens, rows))

    def reset(self):
        self.tokens.fill_(-1)


class Scribe(NoDrafter):
    """Knows how the greedy text goes on, but only while it was shown every token of the text."""

    num_draft_tokens = MOST

    def init_state(self, batch_size, max_length, *, vocab_size, device):
        return Shown(torch.full((batch_size, max_length + 1), -1))

    def prefill(self, context, state):
        offsets = torch.arange(context.tokens.shape[1])
        is_real = offsets <= context.num_new[:, None]
        slots = (context.start[:, None] + offsets).where(is_real, torch.tensor(-1))
        state.tokens.scatter_(1, slots % state.tokens.shape[1], context.tokens)

    def propose(self, context, state, drawing):
        self.prefill(context, state)
        text = torch.nn.utils.rnn.pad_sequence(ROWS, batch_first=True)
        count, steps = context.num_committed[:, None], torch.arange(drawing.num_draft_tokens)
        positions = torch.arange(text.shape[1])
        is_equal = state.tokens[:, : text.shape[1]] == text[:, : state.tokens.shape[1]]
        knows = (is_equal | (positions >= count)).all(dim=1, keepdim=True)
        return Draft((text.gather(1, count + steps) + ~knows) % VOCAB)


def by_heart(name):
    """A head that predicts the tokens after every place of the texts."""
    rows = [row[: len(row) - ROOM + LEARNED] for row in ROWS]
    return MaskTokenDrafter(mask_heads.learned(MODEL, name, MOST, rows), MODEL, MOST)


ORACLES = {
    "itself": lambda: (MODEL, ModelDrafter(MODEL, MOST)),
    "scribe": lambda: (MODEL, Scribe()),
    "eagle1": lambda: (ORACLE_TARGET, oracle_drafter(ORACLE_TARGET, "eagle1", MOST)),
    "eagle3": lambda: (ORACLE_TARGET, oracle_drafter(ORACLE_TARGET, "eagle3", MOST)),
    "mtp": lambda: (ORACLE_TARGET, mtp_oracle("chain", 2, MOST)),
    "mtp, target's state": lambda: (ORACLE_TARGET, mtp_oracle("target", 4, MOST)),
    **{name: lambda name=name: (MODEL, by_heart(name)) for name in mask_heads.ALIGNMENTS},
}


def with_and_without_graphs(target, drafter):
    """Two generators."""
    return [SpeculativeGenerator(target, drafter, graphs=graphs) for graphs in (False, True)]


@pytest.fixture(scope="module", params=ORACLES, name="generators")
def _generators(request):
    return with_and_without_graphs(*ORACLES[request.param]())


def check_all_are_accepted(generator, lengths, **options):
    """Steps of these lengths, as many as the drafter knows the text of."""
    ids = IDS if generator.target.model is MODEL else IDS % ORACLE_VOCAB
    options |= {"max_new_tokens": ROOM, "eos_token_id": None}
    generation = generator.start(ids, MASK, **options)
    room = LEARNED if isinstance(generator.drafter, MaskTokenDrafter) else ROOM
    for length in lengths:
        room -= length + 1
        if room < 0:
            break
        generation.num_draft_tokens = length
        rows = generator.step(generation).fetch().read()
        assert [(row.faults, len(row.draft_tokens)) for row in rows] == [(0, length)] * 2
        assert [row.num_accepted for row in rows] == [length] * 2
    return generation


any_lengths = st.lists(st.integers(0, MOST), min_size=2, max_size=12)


@settings(max_examples=10)
@given(lengths=any_lengths, graphs=st.booleans())
def test_a_drafter_that_is_always_right_is_never_rejected(generators, lengths, graphs):
    check_all_are_accepted(generators[graphs], lengths)


def test_steps_without_a_draft_that_are_replayed_read_what_was_committed(generators):
    generator = generators[True]
    lengths = [MOST, 0] * 8
    if isinstance(generator.drafter, MaskTokenDrafter):
        lengths = [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    generation = check_all_are_accepted(generator, lengths)
    assert set(generation.runner.graphs) >= set(lengths)


def test_a_seeded_target_that_is_its_own_drafter_is_never_rejected_either():
    # A draw is lost only where two forwards round apart: odds of about 1e-6 per token.
    generator = SpeculativeGenerator(*ORACLES["itself"]())
    for seed in range(4):
        check_all_are_accepted(generator, [3, 0, 0, 2, 0, 1, 3], do_sample=True, seed=seed)


class Forgetful(ModelDrafter):
    """Reads nothing in a step that wants one token or none."""

    def propose(self, context, state, drawing):
        if drawing.num_draft_tokens == 1:
            return Draft(context.tokens[:, :1])
        return super().propose(context, state, drawing)


def test_a_drafter_that_does_not_read_is_rejected():
    generator = SpeculativeGenerator(MODEL, Forgetful(MODEL, MOST))
    with pytest.raises(AssertionError):
        check_all_are_accepted(generator, [3, 0, 0, 3, 0, 0, 3])


DRAFTERS = {
    "model": lambda: ModelDrafter(perturbed(MODEL), MOST),
    "lookup": lambda: PromptLookupDrafter(MOST, max_ngram=2),
    "eagle1": lambda: EagleDrafter(head_for(MODEL, kind="input"), MODEL, MOST),
    "eagle3": lambda: EagleDrafter(head_for(MODEL), MODEL, MOST),
    "mtp": lambda: MTPDrafter(mtp_heads.head_for(MODEL), MODEL, MOST),
    "mtp, looped": lambda: MTPDrafter(mtp_heads.head_for(MODEL, num_depths=1), MODEL, MOST),
    "own": lambda: ToyDrafter(new_head(MODEL), MODEL, MOST),
    **{
        name: lambda name=name: MaskTokenDrafter(mask_heads.head_for(MODEL, name), MODEL, MOST)
        for name in mask_heads.ALIGNMENTS
    },
}


@pytest.fixture(scope="module", params=DRAFTERS, name="others")
def _others(request):
    return with_and_without_graphs(MODEL, DRAFTERS[request.param]())


@settings(max_examples=8)
@given(lengths=any_lengths, graphs=st.booleans())
def test_a_proposal_is_that_of_a_call_that_starts_with_the_text_so_far(others, lengths, graphs):
    generator = others[graphs]
    generation = generator.start(IDS, MASK, max_new_tokens=ROOM, eos_token_id=None)
    for length in lengths:
        generation.num_draft_tokens = length
        generator.step(generation)
    counts = generation.lengths.tolist()
    generation.num_draft_tokens = MOST
    found = generator.step(generation).draft
    for row, count in enumerate(counts):
        text = generation.tokens[row : row + 1, :count]
        fresh = generator.start(text, max_new_tokens=ROOM, eos_token_id=None)
        expected = generator.step(fresh).draft
        assert found.tokens[row].equal(expected.tokens[0])
        if expected.num_valid is not None:
            assert found.num_valid[row].equal(expected.num_valid[0])
