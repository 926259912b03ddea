"""`MaskTokenDrafter` by itself: laws 8, 9 and 13, the end of positions, a step that never waits.

Probabilities come with tokens that were drawn from them, a state that was built up in blocks
proposes what a fresh one would, and what belongs to no row makes no difference.
"""

import copy
from dataclasses import replace

import pytest
import torch
from architectures import VOCAB, build
from drafting import drawing, ragged_prompts
from eagle_heads import FeatureLoop, features_for, stand_in
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_heads import ALIGNMENTS, WIRINGS, head_for, informed, random_drafter, random_head
from mask_heads import VOCAB as SMALL_VOCAB
from plain_loop import PlainLoop
from test_eagle_proposal import chi_square_p_value

from specdec import MaskTokenDrafter, SpeculativeGenerator
from specdec.graphs import no_host_sync
from specdec.kernels import draw
from specdec.samplers import Noise, Stream, Warp
from specdec.target.cache import round_up
from specdec.types import Context

CPU = torch.device("cpu")
seeds = st.integers(0, 2**32 - 1)
WARPS = {
    "plain": {},
    "warped": {"temperature": 0.7, "top_k": 6, "top_p": 0.9},
    "greedy": {"temperature": 0},
}


def loop_of(drafter, prompts, width, seed):
    """A loop that brings features where the head reads any."""
    if not drafter.feature_layers:
        return PlainLoop(prompts, width)
    return FeatureLoop(prompts, width, features_for(drafter.config, len(prompts), 40, seed))


def picked(loop, rows):
    """The same loop over some of its rows."""
    few = copy.copy(loop)
    few.rows, few.num_new = [loop.rows[i] for i in rows], [loop.num_new[i] for i in rows]
    if isinstance(loop, FeatureLoop):
        few.table = loop.table[rows]
    return few


def propose(drafter, loop, state, warp, *, context=None, rows=None):
    """The next proposal of a loop, with noise that depends on rows and positions alone."""
    rows = list(range(len(loop.rows))) if rows is None else rows
    starts = torch.tensor([len(row) - 1 for row in loop.rows])
    step = Noise(rows).at(starts, loop.width)
    context = loop.context() if context is None else context
    return drafter.propose(context, state, drawing(drafter, Warp(len(rows), **warp), step)), step


def assert_same(draft, other):
    """Equal where valid."""
    assert draft.num_valid.equal(other.num_valid)
    is_valid = draft.num_valid > 0
    assert draft.tokens[is_valid].equal(other.tokens[is_valid])
    if draft.probs is not None:
        probs = draft.probs[is_valid], other.probs[is_valid]
        torch.testing.assert_close(*probs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("warp", WARPS.values(), ids=WARPS)
@pytest.mark.parametrize("name", [*ALIGNMENTS, "p-eagle, fewer ids", "dspark, causal"])
@settings(max_examples=3)
@given(seeds, st.integers(1, 4), st.integers(1, 5))
@torch.no_grad()
def test_a_state_built_up_in_blocks_proposes_what_a_fresh_one_would(
    name, warp, seed, width, chunk_size
):
    generator = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    def fresh():
        return drafter.init_state(3, 40, vocab_size=SMALL_VOCAB, device=CPU)

    drafter = random_drafter(name, width, proposal="sample")
    prompts = [[integer(0, SMALL_VOCAB - 1) for _ in range(integer(1, 9))] for _ in range(3)]
    loop, state = loop_of(drafter, prompts, width, seed), fresh()
    loop.prefill(drafter, state, chunk_size)
    for _ in range(4):
        draft, step = propose(drafter, loop, state, warp)
        is_long = max(map(len, loop.rows)) > 1
        scratch = loop.context_from_scratch() if is_long else loop.context()
        expected, _ = propose(drafter, loop, fresh(), warp, context=scratch)
        if drafter.feature_layers:  # a row without anything new has ended
            is_new = torch.tensor(loop.num_new) > 0
            expected = replace(expected, num_valid=expected.num_valid * is_new)
        assert_same(draft, expected)
        if draft.probs is not None:
            for b in range(3):
                if draft.num_valid[b]:
                    drawn = draw(draft.probs[b], step.uniform(Stream.PROPOSE)[b, :width])
                    assert draft.tokens[b].equal(drawn)
        # Some of the rows, kept of a copy, go on alike.
        rows = [[2], [2, 1], [0, 2], [0, 1]][integer(0, 3)]
        kept, few = copy.deepcopy(state).keep(rows), picked(loop, rows)
        other, _ = propose(drafter, few, kept, warp, rows=rows)
        assert other.tokens[other.num_valid > 0].equal(draft.tokens[rows][other.num_valid > 0])
        tokens = draft.tokens.tolist()
        new = [[*tokens[b][: integer(0, width)], integer(0, SMALL_VOCAB - 1)] for b in range(3)]
        new[integer(0, 2)] = []
        loop.commit(new)


@pytest.mark.parametrize("name", ALIGNMENTS)
@torch.no_grad()
def test_a_state_that_was_reset_keeps_its_storage_and_nothing_else(name):
    drafter = random_drafter(name)
    state = drafter.init_state(2, 40, vocab_size=SMALL_VOCAB, device=CPU)
    drafts = []
    for _ in range(2):
        loop = loop_of(drafter, [[3, 1, 4, 1, 5], [9, 2]], 3, 0)
        loop.prefill(drafter, state, 8)
        drafts.append(propose(drafter, loop, state, {})[0])
        other = loop_of(drafter, [[6] * 20, [7] * 9], 3, 1)
        other.prefill(drafter, state, 8)
        address = state.cache.keys[0].data_ptr()
        state.cache.values[0][:, 5] = torch.nan  # as an overflow in the text before would leave it
        state.reset()
        assert state.cache.keys[0].data_ptr() == address
    assert_same(*drafts)


@pytest.mark.parametrize("name", [n for n in WIRINGS if WIRINGS[n].block_size is None])
@torch.no_grad()
def test_a_causal_head_proposes_the_same_first_tokens_for_any_k(name):
    """Masks after a row make no difference to it."""
    drafts = []
    for width in (1, 2, 5):
        drafter = random_drafter(name, width, proposal="sample")
        state = drafter.init_state(1, 30, vocab_size=SMALL_VOCAB, device=CPU)
        loop = loop_of(drafter, [[3, 1, 4, 1]], width, 0)
        loop.prefill(drafter, state, 8)
        drafts.append(propose(drafter, loop, state, {})[0])
    for draft in drafts[:2]:
        expected = drafts[2].probs[:, : draft.probs.shape[1]]
        torch.testing.assert_close(draft.probs, expected, rtol=0, atol=1e-10)


# Law 8.


HONEST = {
    "p-eagle": ("p-eagle, fewer ids", {}, {"temperature": 0.8}),
    "pard": ("pard", {}, {"temperature": 1.2, "top_k": 12, "top_p": 0.9}),
    "dflash": ("dflash", {"draft_temperature": 0.5}, {"temperature": 1.3}),
    "dspark": ("dspark", {}, {}),
}


@pytest.mark.parametrize("case", HONEST)
@torch.no_grad()
def test_tokens_drawn_many_times_match_the_probabilities_that_come_with_them(case):
    """False-alarm rate 1e-9 per check. Distributions half a temperature apart fail it by far.
    Draws of one pass are independent: so are their pairs.
    """
    name, options, warp = HONEST[case]
    rows, drafter = 8000, random_drafter(name, 2, proposal="sample", **options)
    state = drafter.init_state(rows, 8, vocab_size=SMALL_VOCAB, device=CPU)
    features = None
    if drafter.feature_layers:
        features = features_for(drafter.config, 1, 3, 4).expand(rows, -1, -1)
    text = torch.tensor([[5, 17, 3, 8]]).expand(rows, -1)
    start = torch.zeros(rows, dtype=torch.long)
    context = Context(text, features, start, start + 3, num_attended=6)
    step = Noise(list(range(rows))).at(start + 3, 3)
    draft = drafter.propose(context, state, drawing(drafter, Warp(rows, **warp), step))
    assert bool((draft.probs.gather(2, draft.tokens[..., None]) > 0).all())
    for i in range(2):
        probs = draft.probs[:, i].double()
        assert chi_square_p_value(draft.tokens[:, i], probs.sum(0)) > 1e-9
        flat = probs.sqrt() / probs.sqrt().sum(-1, keepdim=True)
        assert chi_square_p_value(draft.tokens[:, i], flat.sum(0)) < 1e-9
    first, second = draft.tokens[:, 0], draft.tokens[:, 1]
    pairs = draft.probs[:, 0, :, None].double() * draft.probs[:, 1, None].double()
    together = first * SMALL_VOCAB + second
    assert chi_square_p_value(together, pairs.flatten(1).sum(0)) > 1e-9


@torch.no_grad()
def test_an_argmax_proposal_is_a_point_mass_and_a_sampled_one_is_the_default():
    drafts = []
    for options, warp in (({"proposal": "argmax"}, {}), ({}, {"temperature": 0})):
        drafter = random_drafter("p-eagle, fewer ids", 3, **options)
        state = drafter.init_state(1, 20, vocab_size=SMALL_VOCAB, device=CPU)
        loop = loop_of(drafter, [[3, 1, 4]], 3, 0)
        loop.prefill(drafter, state, 8)
        drafts.append(propose(drafter, loop, state, warp)[0])
    assert drafts[0].probs is None
    assert drafts[0].tokens.equal(drafts[1].tokens)
    assert set(drafts[0].tokens.flatten().tolist()) <= set(drafter.head.target_ids.tolist())


# The end of the positions.


@pytest.mark.parametrize("name", ALIGNMENTS)
@torch.no_grad()
def test_rows_past_the_heads_positions_are_never_written_and_fewer_tokens_are_valid(name):
    """A text that grows into the limit: proposals are those of a head without one, as long as they
    last, and no slot at the limit is touched.
    """
    limit, width = 14, 3
    config = WIRINGS[name]
    head, target = random_head(replace(config, max_positions=limit)), stand_in(config)
    drafter = MaskTokenDrafter(head, target, width, proposal="sample")
    free = MaskTokenDrafter(random_head(config), target, width, proposal="sample")
    states = [d.init_state(2, 40, vocab_size=SMALL_VOCAB, device=CPU) for d in (drafter, free)]
    for state in states:  # zeros could hide a write
        for buffer in (*state.cache.keys.values(), *state.cache.values.values()):
            buffer.fill_(5.0)
    loop = loop_of(drafter, [[3, 1, 4, 1, 5, 9], [2, 7, 1]], width, 0)
    for d, state in zip((drafter, free), states, strict=True):
        loop.prefill(d, state, 4)
    first = config.rows.first_row - config.rows.shift + 1
    seen = set()
    for step in range(14):
        drafts = [propose(d, loop, s, {})[0] for d, s in zip((drafter, free), states, strict=True)]
        for b, row in enumerate(loop.rows):
            valid = int(drafts[0].num_valid[b])
            assert valid == min(max(limit - (len(row) - 1 + first), 0), width), step
            seen.add(valid)
            is_whole = config.block_size is None or len(row) - 1 + config.block_size <= limit
            if is_whole:
                torch.testing.assert_close(
                    drafts[0].probs[b, :valid], drafts[1].probs[b, :valid], rtol=0, atol=1e-10
                )
        loop.commit([[1 + step % 7], [2 + step % 5]])
    assert {0, 1, 2, 3} <= seen
    for buffer in (*states[0].cache.keys.values(), *states[0].cache.values.values()):
        assert bool((buffer[:, limit : states[0].cache.trash] == 5.0).all())


def test_a_block_bounds_how_many_tokens_are_drafted():
    config = WIRINGS["dflash"]
    head, target = random_head(config), stand_in(config)
    assert MaskTokenDrafter(head, target, 5).num_draft_tokens == 5
    with pytest.raises(ValueError, match=r"blocks of 6 rows, which predict 5 tokens; .* got 6"):
        MaskTokenDrafter(head, target, 6)
    dspark = WIRINGS["dspark"]
    assert MaskTokenDrafter(random_head(dspark), target, 6).num_draft_tokens == 6


@pytest.mark.parametrize("name", ["p-eagle", "dflash"])
def test_a_context_without_features_or_with_others_is_refused(name):
    drafter = random_drafter(name)
    state = drafter.init_state(1, 20, vocab_size=SMALL_VOCAB, device=CPU)
    one = torch.tensor([1])
    context = Context(torch.tensor([[3, 1]]), None, 0 * one, one, num_attended=4)
    with pytest.raises(ValueError, match="needs the target's features"):
        drafter.prefill(context, state)
    with pytest.raises(ValueError, match=r"was made for another target"):
        drafter.prefill(replace(context, features=torch.zeros(1, 1, 5)), state)


# In the loop.

LLAMA = build("llama")
LENGTHS = 1, 4, 6, 9
IDS, MASK = ragged_prompts(VOCAB, *LENGTHS)
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "has_embed_tokens": True,
    "has_lm_head": True,
}
HEADS = {name: informed(LLAMA, head_for(LLAMA, name, **WIDE), 4) for name in ALIGNMENTS}


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_poison_where_nobody_may_look_changes_nothing(name):
    """Features of rejected and of missing tokens, slots that are not attended to, slots of the
    window and of masks of the step before, the trash slot, and tokens after a row's end.
    """
    drafter = MaskTokenDrafter(HEADS[name], LLAMA, 4, proposal="sample")
    generator = SpeculativeGenerator(LLAMA, drafter)
    options = {"max_new_tokens": 30, "eos_token_id": None, "do_sample": True, "seed": 5}
    clean, poisoned = (generator.start(IDS, MASK, **options) for _ in range(2))
    for _ in range(5):
        state = poisoned.state
        cache = state.drafter_state.cache
        if state.features is not None:
            is_unknown = torch.arange(state.features.shape[1]) >= state.buffer.num_new[:, None]
            state.features[is_unknown] = torch.nan
        is_behind = torch.arange(poisoned.tokens.shape[1]) >= poisoned.lengths[:, None]
        poisoned.tokens[is_behind] = 10**9
        after_new = torch.arange(state.buffer.recent.shape[1]) > state.buffer.num_new[:, None]
        state.buffer.recent[after_new] = 10**9
        block = drafter.config.block_size or 0
        reach = round_up(poisoned.state.num_attended + max(block - 5, 0))
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


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "top_k": 9, "top_p": 0.8, "seed": 2}], ids=str
)
def test_a_step_runs_without_waiting_and_always_in_the_same_shapes(name, options):
    drafter = MaskTokenDrafter(HEADS[name], LLAMA, 3, proposal="sample")
    generator = SpeculativeGenerator(LLAMA, drafter)
    state = generator.start(IDS, MASK, max_new_tokens=40, eos_token_id=None, **options)
    steps = []
    for _ in range(3):
        state.state.buffer.note_longest(10**9)
        with no_host_sync() as seen:
            generator.step(state)
        steps.append(seen.shapes)
    assert len(steps[0]) > 100
    assert steps[0][-1] == steps[1][-1]
    assert steps[1] == steps[2]
