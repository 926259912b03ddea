"""`EagleDrafter` by itself: laws 8, 9 and 13, and the step that never waits.

Laws come with tokens that were drawn from them, a state that was built up in blocks proposes what a
fresh one would, and what belongs to no row has no say.
"""

import copy
from dataclasses import replace

import pytest
import torch
from architectures import VOCAB, build
from drafting import drawing, ragged_prompts
from eagle_heads import VOCAB as SMALL_VOCAB
from eagle_heads import FeatureLoop, features_for, head_for, informed, random_drafter
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specdec import EagleDrafter, SpeculativeGenerator
from specdec.graphs import no_host_sync
from specdec.kernels import draw
from specdec.samplers import Noise, Stream, Warp
from specdec.target.cache import round_up
from specdec.types import Context

CPU = torch.device("cpu")
seeds = st.integers(0, 2**32 - 1)
GATES = {
    "plain": {},
    "warped": {"temperature": 0.7, "top_k": 6, "top_p": 0.9},
    "greedy": {"temperature": 0},
}


def propose(drafter, loop, state, gate, *, context=None):
    """The next proposal of a loop, with noise that depends on rows and positions alone."""
    rows = len(loop.rows)
    starts = torch.tensor([len(row) - 1 for row in loop.rows])
    step = Noise(list(range(rows))).at(starts, loop.width)
    context = loop.context() if context is None else context
    return drafter.propose(context, state, drawing(drafter, Warp(rows, **gate), step)), step


def started(name, num_draft_tokens, **options):
    """A drafter, its state and a loop, behind a prompt of three tokens."""
    drafter = random_drafter(name, num_draft_tokens, **options)
    state = drafter.init_state(1, 20, vocab_size=SMALL_VOCAB, device=CPU)
    loop = FeatureLoop([[3, 1, 4]], num_draft_tokens, features_for(drafter.config, 1, 20, 0))
    loop.prefill(drafter, state, 8)
    return drafter, loop, state


def assert_same(draft, other):
    """Equal where valid."""
    assert draft.num_valid.equal(other.num_valid)
    is_valid = draft.num_valid > 0
    assert draft.tokens[is_valid].equal(other.tokens[is_valid])
    if draft.probs is not None:
        probs = draft.probs[is_valid], other.probs[is_valid]
        torch.testing.assert_close(*probs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "three layers", "fewer ids"])
@settings(max_examples=3)
@given(seeds, st.integers(1, 4), st.integers(1, 5))
@torch.no_grad()
def test_a_state_built_up_in_blocks_proposes_what_a_fresh_one_would(
    name, gate, seed, width, chunk_size
):
    generator = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    def fresh(rows=3):
        return drafter.init_state(rows, 40, vocab_size=SMALL_VOCAB, device=CPU)

    drafter = random_drafter(name, width)
    prompts = [[integer(0, SMALL_VOCAB - 1) for _ in range(integer(1, 9))] for _ in range(3)]
    loop = FeatureLoop(prompts, width, features_for(drafter.config, 3, 40, seed))
    state = fresh()
    loop.prefill(drafter, state, chunk_size)
    for _ in range(4):
        draft, step = propose(drafter, loop, state, gate)
        is_long = max(map(len, loop.rows)) > 1
        scratch = loop.context_from_scratch() if is_long else loop.context()
        expected, _ = propose(drafter, loop, fresh(), gate, context=scratch)
        is_new = torch.tensor(loop.num_new) > 0
        expected = replace(expected, num_valid=expected.num_valid * is_new)  # it has ended since
        assert_same(draft, expected)
        if draft.probs is not None:
            for b in range(3):
                if loop.num_new[b]:
                    drawn = draw(draft.probs[b], step.uniform(Stream.PROPOSE)[b, :width])
                    assert draft.tokens[b].equal(drawn)
        # Some of the rows, kept of a copy, go on alike.
        rows = [[2], [2, 1], [0, 2], [0, 1]][integer(0, 3)]
        few = FeatureLoop([loop.rows[i] for i in rows], width, loop.table[rows])
        few.num_new = [loop.num_new[i] for i in rows]
        starts = torch.tensor([len(row) - 1 for row in few.rows])
        noise = Noise(rows).at(starts, width + 1)
        kept = copy.deepcopy(state).keep(rows)
        picked = drafter.propose(
            few.context(), kept, drawing(drafter, Warp(len(rows), **gate), noise)
        )
        assert picked.tokens[picked.num_valid > 0].equal(draft.tokens[rows][picked.num_valid > 0])
        tokens = draft.tokens.tolist()
        new = [[*tokens[b][: integer(0, width)], integer(0, SMALL_VOCAB - 1)] for b in range(3)]
        new[integer(0, 2)] = []
        loop.commit(new)


@torch.no_grad()
def test_a_state_that_was_reset_keeps_its_storage_and_nothing_else():
    drafter = random_drafter("eagle3")
    state = drafter.init_state(2, 40, vocab_size=SMALL_VOCAB, device=CPU)
    drafts = []
    for _ in range(2):
        loop = FeatureLoop([[3, 1, 4, 1, 5], [9, 2]], 3, features_for(drafter.config, 2, 40, 0))
        loop.prefill(drafter, state, 8)
        drafts.append(propose(drafter, loop, state, {})[0])
        other = FeatureLoop([[6] * 20, [7] * 9], 3, features_for(drafter.config, 2, 40, 1))
        other.prefill(drafter, state, 8)
        address = state.cache.keys[0].data_ptr()
        state.cache.values[0][:, 5] = torch.nan  # as an overflow in the text before would leave it
        state.reset()
        assert state.cache.keys[0].data_ptr() == address
    assert_same(*drafts)


# Law 8.


def chi_square_p_value(tokens, expected):
    """Of counts against expected counts; ids expected fewer than 5 times share a bin."""
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    rare = expected < 5
    bins = [torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected)]
    bins = [x[bins[1] > 0].numpy() for x in bins]
    return stats.chisquare(*bins, sum_check=False).pvalue


HONEST = {
    "eagle1": ("eagle1", {}, {}),
    "fewer ids": ("fewer ids", {}, {"temperature": 0.8}),
    "draft temperature": ("fewer ids", {"draft_temperature": 0.5}, {"temperature": 1.3}),
    "top-k and top-p": ("eagle3", {}, {"temperature": 1.2, "top_k": 12, "top_p": 0.9}),
}


@pytest.mark.parametrize("case", HONEST)
@torch.no_grad()
def test_tokens_drawn_many_times_match_the_laws_that_come_with_them(case):
    """False-alarm rate 1e-9 per check. Laws half a temperature apart fail it by far."""
    name, options, gate = HONEST[case]
    rows, drafter = 8000, random_drafter(name, 2, **options)
    state = drafter.init_state(rows, 8, vocab_size=SMALL_VOCAB, device=CPU)
    features = features_for(drafter.config, 1, 3, 4).expand(rows, -1, -1)
    text = torch.tensor([[5, 17, 3, 8]]).expand(rows, -1)
    start = torch.zeros(rows, dtype=torch.long)
    context = Context(text, features, start, start + 3, num_attended=4)
    step = Noise(list(range(rows))).at(start + 3, 3)
    draft = drafter.propose(context, state, drawing(drafter, Warp(rows, **gate), step))
    assert bool((draft.probs.gather(2, draft.tokens[..., None]) > 0).all())
    if name == "fewer ids":
        impossible = torch.ones(SMALL_VOCAB, dtype=torch.bool)
        impossible[drafter.head.target_ids] = False
        assert int(impossible.sum()) == SMALL_VOCAB - 9
        assert not bool(draft.probs[..., impossible].any())
        assert bool((draft.probs[..., ~impossible] > 0).any(dim=0).all())
    for i in range(2):
        law = draft.probs[:, i].double()
        assert chi_square_p_value(draft.tokens[:, i], law.sum(0)) > 1e-9
        flat = law.sqrt() / law.sqrt().sum(-1, keepdim=True)
        assert chi_square_p_value(draft.tokens[:, i], flat.sum(0)) < 1e-9
    same_first = draft.tokens[:, 0] == draft.tokens[:, 0].mode().values
    law = draft.probs[same_first, 1].double()
    assert chi_square_p_value(draft.tokens[same_first, 1], law.sum(0)) > 1e-9


@torch.no_grad()
def test_a_draft_temperature_is_that_of_the_draft_law_whatever_the_targets_is():
    laws = []
    for own, temperature in ((0.5, 1.3), (None, 0.5), (None, 1.3)):
        case = started("fewer ids", 1, draft_temperature=own)
        laws.append(propose(*case, {"temperature": temperature})[0].probs)
    torch.testing.assert_close(laws[0], laws[1], rtol=0, atol=1e-12)
    assert (laws[0] - laws[2]).abs().max() > 0.01


@torch.no_grad()
def test_an_argmax_proposal_is_a_point_mass_on_the_likeliest_id_that_the_head_has():
    case = started("fewer ids", 2, proposal="argmax")
    draft, _ = propose(*case, {})
    expected, _ = propose(*started("fewer ids", 2), {"temperature": 0})
    assert draft.probs is None
    assert draft.tokens.equal(expected.tokens)
    assert set(draft.tokens.flatten().tolist()) <= set(case[0].head.target_ids.tolist())


# In the loop.

LLAMA = build("llama")
LENGTHS = 1, 4, 6, 9
IDS, MASK = ragged_prompts(VOCAB, *LENGTHS)
WIDE = {"hidden_size": 128, "intermediate_size": 256, "has_embed_tokens": True}
HEADS = {
    "eagle1": head_for(LLAMA, kind="input"),
    "eagle3": informed(LLAMA, head_for(LLAMA, **WIDE)),
    "fewer ids": informed(LLAMA, head_for(LLAMA, draft_vocab_size=40, fc_norm=True)),
}


@pytest.mark.parametrize("kind", HEADS)
@torch.inference_mode()
def test_poison_where_nobody_may_look_changes_nothing(kind):
    """Features of rejected and of missing tokens, slots that are not attended to, slots of the
    window, the trash slot, and tokens after a row's end.
    """
    generator = SpeculativeGenerator(LLAMA, EagleDrafter(HEADS[kind], LLAMA, 4))
    options = {"max_new_tokens": 30, "eos_token_id": None, "do_sample": True, "seed": 5}
    clean, poisoned = (generator.start(IDS, MASK, **options) for _ in range(2))
    for _ in range(5):
        state = poisoned.state
        cache = state.drafter_state.cache
        is_unknown = torch.arange(state.features.shape[1]) >= state.buffer.num_new[:, None]
        state.features[is_unknown] = torch.nan
        is_behind = torch.arange(poisoned.tokens.shape[1]) >= poisoned.lengths[:, None]
        poisoned.tokens[is_behind] = 10**9
        reach = round_up(poisoned.state.num_attended)
        num_read = state.buffer.anchor_position - state.buffer.num_new  # not written again
        slots = torch.arange(cache.num_slots + 1)
        buffers = *cache.keys.values(), *cache.values.values()
        for buffer in buffers:
            buffer[slots >= num_read[:, None]] = 1e30
            buffer[:, slots >= reach] = torch.nan
        expected, outcome = generator.step(clean), generator.step(poisoned)
        assert outcome.draft.num_valid.equal(expected.draft.num_valid)
        is_valid = expected.draft.num_valid > 0
        assert outcome.draft.tokens[is_valid].equal(expected.draft.tokens[is_valid])
        assert outcome.draft.probs[is_valid].equal(expected.draft.probs[is_valid])
        assert outcome.verdict.tokens.equal(expected.verdict.tokens)
        assert not bool(outcome.verdict.faults.any())
        for buffer in buffers:
            buffer.nan_to_num_()  # the next step reaches further


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    "gate", [{}, {"do_sample": True, "top_k": 9, "top_p": 0.8, "seed": 2}], ids=str
)
def test_a_step_runs_without_waiting_and_always_in_the_same_shapes(kind, gate):
    generator = SpeculativeGenerator(LLAMA, EagleDrafter(HEADS[kind], LLAMA, 3))
    state = generator.start(IDS, MASK, max_new_tokens=40, eos_token_id=None, **gate)
    steps = []
    for _ in range(3):
        state.state.buffer.note_longest(10**9)
        with no_host_sync() as seen:
            generator.step(state)
        steps.append(seen.shapes)
    assert len(steps[0]) > 100
    assert steps[0][-1] == steps[1][-1]
    assert steps[1] == steps[2]
