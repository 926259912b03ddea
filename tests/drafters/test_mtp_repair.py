"""Law 9 of `MTPDrafter`: after any pattern of acceptance, every depth's keys and values below the
anchor, and the proposals, are those of a recomputation of the committed text without a cache.

The loop commits drafted tokens as a verifier would: an accepted prefix and one token more. A
drafter that rolls its window without repair must fail the same check.
"""

from dataclasses import replace

import pytest
import torch
from drafting import drawing
from eagle_heads import FeatureLoop
from hypothesis import given, settings
from hypothesis import strategies as st
from mtp_checkpoints import random_model
from mtp_heads import VOCAB, WIRINGS, Recomputation, random_drafter, randomise

from specdec.checkpoints import hf_layers
from specdec.drafters import MTPConfig, MTPDrafter, MTPHead
from specdec.heads.shift_window import ShiftedWindow
from specdec.samplers import Noise, Warp

CPU = torch.device("cpu")
ROWS, LENGTH = 3, 40
seeds = st.integers(0, 2**32 - 1)
ROUNDING = 1e-5  # rotary angles are float32; a stale entry is off by 0.1 and more
GREEDY = Warp(ROWS, temperature=0)


class NaiveRoll(MTPDrafter):
    """Reads new tokens only: what depths computed from rejected tokens stays in their caches."""

    def shift(self, context, state, width, num_later=0):
        window = super().shift(context, state, width, num_later)
        is_new = window.slots >= context.start[:, None]
        return ShiftedWindow(
            window.tokens, window.features, torch.where(is_new, window.slots, state.cache.trash)
        )


class Run:
    """A drafter at work on three texts, and what a recomputation says of each."""

    def __init__(self, drafter, seed, chunk_size, poison=1e30):
        self.drafter, self.oracle = drafter, Recomputation(drafter)
        self.generator = torch.Generator().manual_seed(seed)
        prompts = [
            [self.integer(0, VOCAB - 1) for _ in range(self.integer(1, 9))] for _ in range(ROWS)
        ]
        shape = ROWS, LENGTH, drafter.config.hidden_size
        self.features = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        self.width = drafter.num_draft_tokens
        self.loop = FeatureLoop(prompts, self.width, self.features)
        self.state = drafter.init_state(ROWS, LENGTH, vocab_size=VOCAB, device=CPU)
        for buffer in (*self.state.cache.keys.values(), *self.state.cache.values.values()):
            buffer.fill_(poison)
        self.loop.prefill(drafter, self.state, chunk_size)

    def integer(self, low, high):
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def propose(self, width=None):
        """The next proposal, of `width` tokens; as many as the drafter can by default."""
        starts = torch.tensor([len(row) - 1 for row in self.loop.rows])
        step = drawing(self.drafter, GREEDY, Noise([0] * ROWS).at(starts, self.width + 1))
        if width is not None:
            step = replace(step, num_draft_tokens=width)
        return self.drafter.propose(self.loop.context(), self.state, step)

    def commit(self, draft, patterns=None):
        """An accepted prefix and one token more of every row.

        Args:
            draft: of this step.
            patterns: tokens to accept of each row; drawn if not given. -1 ends a row.
        """
        new, count = [], draft.tokens.shape[1]
        for b, tokens in enumerate(draft.tokens.tolist()):
            most = count if int(draft.num_valid[b]) else 0
            accepted = self.integer(0, most) if patterns is None else min(patterns[b], most)
            is_over = patterns is not None and patterns[b] < 0
            new.append([] if is_over else [*tokens[:accepted], self.integer(0, VOCAB - 1)])
        self.loop.commit(new)

    def worst_entry(self) -> float:
        """The largest error among entries that depend on committed tokens only."""
        worst = 0.0
        for b, row in enumerate(self.loop.rows):
            if not self.loop.num_new[b]:
                continue  # nothing was read: a text of one token, or one that has ended
            for depth, pair in enumerate(self.oracle.entries(row, self.features[b])):
                for table, expected in zip(("keys", "values"), pair, strict=True):
                    found = getattr(self.state.cache, table)[depth][b, : len(expected)]
                    if len(expected):
                        worst = max(worst, float((found - expected).abs().max()))
        return worst

    def num_wrong(self, draft, count) -> int:
        """How many draft tokens differ from those of a recomputation."""
        wrong = 0
        for b, row in enumerate(self.loop.rows):
            if not self.loop.num_new[b]:
                continue
            expected, _ = self.oracle.propose(row, self.features[b], count)
            wrong += sum(map(int.__ne__, draft.tokens[b, :count].tolist(), expected))
        return wrong


DEPTHS_AND_TOKENS = dict.fromkeys(WIRINGS, (4,)) | {
    "chain": (2, 3, 5),  # fewer tokens than depths, as many, more
    "target": (3, 5),
    "one depth": (1, 4),
    "five depths": (2, 7),
}
CASES = [(name, width) for name, widths in DEPTHS_AND_TOKENS.items() for width in widths]


@pytest.mark.parametrize(("name", "width"), CASES)
@settings(max_examples=4)
@given(seeds, st.integers(1, 6), st.data())
@torch.no_grad()
def test_caches_and_proposals_are_those_of_a_recomputation(name, width, seed, chunk_size, data):
    """Drafts of any lengths: a step of few tokens, or of none, leaves no depth with a hole."""
    run = Run(random_drafter(name, width), seed, chunk_size)
    for step in range(6):
        count = data.draw(st.integers(0, width)) if step % 2 else width
        draft = run.propose(max(count, 1))  # as the loop does: the token is dropped
        draft = replace(draft, tokens=draft.tokens[:, :count])
        assert run.worst_entry() < ROUNDING
        assert run.num_wrong(draft, count) == 0
        if count == 0:
            draft = replace(draft, num_valid=torch.zeros(ROWS, dtype=torch.long))
        run.loop.width = count + 1  # what this step may commit
        run.commit(draft)


@pytest.mark.parametrize("name", ["chain", "target"])
@settings(max_examples=4)
@given(seeds)
@torch.no_grad()
def test_rows_that_have_ended_change_nothing_and_others_go_on(name, seed):
    run = Run(random_drafter(name, 3), seed, 3)
    run.commit(run.propose(), [0, -1, 2])
    for patterns in ([1, -1, 0], [-1, -1, 3], [-1, -1, 0]):
        before = [buffer.clone() for buffer in run.state.cache.keys.values()]
        past = run.state.past.features.clone()
        draft = run.propose()
        assert run.worst_entry() < ROUNDING
        assert run.num_wrong(draft, 3) == 0
        ended = [b for b in range(ROWS) if not run.loop.num_new[b]]
        assert draft.num_valid[ended].tolist() == [0] * len(ended)
        for old, buffer in zip(before, run.state.cache.keys.values(), strict=True):
            assert old[ended, :-1].equal(buffer[ended, :-1])  # all but the trash slot
        assert past[ended].equal(run.state.past.features[ended])
        run.commit(draft, patterns)


# Negative controls: the check above fails where nothing, or too little, is repaired.

SEEDS = range(3)


def errors(drafter_class, name, width, patterns):
    """The worst entry and the number of wrong draft tokens of some steps."""
    worst, wrong = 0.0, 0
    for seed in SEEDS:
        drafter = random_drafter(name, width)
        drafter.__class__ = drafter_class
        run = Run(drafter, seed, 4, poison=0.0)
        for accepted in patterns:
            draft = run.propose()
            worst, wrong = max(worst, run.worst_entry()), wrong + run.num_wrong(draft, width)
            run.commit(draft, [accepted] * ROWS)
    return worst, wrong


@pytest.mark.parametrize("name", ["chain", "target"])
@torch.no_grad()
def test_a_naive_roll_keeps_stale_entries_and_proposes_other_tokens(name):
    worst, wrong = errors(NaiveRoll, name, 3, [0, 1, 0, 2])
    assert worst > 0.1
    assert wrong > 0
    assert errors(MTPDrafter, name, 3, [0, 1, 0, 2])[0] < ROUNDING


class RemembersLess(MTPDrafter):
    """The oldest remembered row is lost."""

    def shift(self, context, state, width, num_later=0):
        window = super().shift(context, state, width, num_later)
        oldest = context.start + context.num_new - self.num_depths
        is_oldest = window.slots == oldest[:, None]
        is_oldest &= (context.num_new == 1)[:, None]
        return window._replace(slots=torch.where(is_oldest, state.cache.trash, window.slots))


@torch.no_grad()
def test_one_row_less_to_remember_is_too_few():
    """At the first step after prefill, and after every step that accepts nothing, the last depth
    has D - 1 stale entries.
    """
    assert errors(RemembersLess, "chain", 3, [0, 0])[0] > 0.1


# Layers of HF's own classes attend by themselves; their oracle is a drafter that reads the whole
# text at once.

HF_LAYERS = {
    "deepseek_v3": ("DeepseekV3", hf_layers.last_layer),
    "glm4_moe": ("Glm4Moe", hf_layers.last_layer),
    "mistral, sliding": ("Mistral", hf_layers.dense_layer()),
}


@pytest.mark.parametrize("semantics", ["chain", "target"])
@pytest.mark.parametrize("name", HF_LAYERS)
@settings(max_examples=2)
@given(seeds, st.integers(1, 5))
@torch.no_grad()
def test_modules_of_hf_layers_propose_what_a_fresh_drafter_would(name, semantics, seed, chunk_size):
    family, layer_of = HF_LAYERS[name]
    model = random_model(family, vocab_size=VOCAB)
    config = MTPConfig(layer_of(model), VOCAB, num_layers=3, semantics=semantics)
    head = randomise(MTPHead(config).eval(), seed)
    drafter = MTPDrafter(head, model, 4)
    run = Run(drafter, seed, chunk_size, poison=50.0)
    for _ in range(5):
        draft = run.propose()
        fresh = drafter.init_state(ROWS, LENGTH, vocab_size=VOCAB, device=CPU)
        scratch = run.loop.context_from_scratch()
        step = drawing(drafter, GREEDY, Noise([0] * ROWS).at(scratch.start, 5))
        expected = drafter.propose(scratch, fresh, step)
        is_valid = draft.num_valid > 0
        assert draft.tokens[is_valid].equal(expected.tokens[is_valid])
        run.commit(draft)
