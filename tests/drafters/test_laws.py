"""The laws that every drafter is held to, whatever its family; laws by the numbers of
`tests/README.md`. What is special to a family is in that family's file.
"""

import copy
from dataclasses import replace
from functools import cache

import mtp_heads
import pytest
import torch
from architectures import VOCAB, build
from diagonal import case, diagonal, first
from drafter_table import (
    EXTENDED,
    IDS,
    JOINED,
    LEARNED,
    MASK,
    MODEL,
    MOST,
    OF_PROPOSALS,
    OF_TEXTS,
    ONE_OF_EACH,
    ORACLES,
    RECURRENT,
    ROOM,
    WIDE,
    WITH_LOGITS,
    commit_some,
    eagle,
    fresh_state,
    is_valid,
    loop_of,
    make,
    masks,
    propose,
    random_texts,
)
from drafting import perturbed, ragged_prompts, to_right_padding
from eagle_heads import FeatureLoop
from eagle_heads import head_for as eagle_head_for
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_heads import head_for as mask_head_for
from scipy import stats
from state_tensors import addresses
from text_laws import ALPHA, PROMPT, ROWS, TARGET, p_values_of_texts, sample, tiny

from specdec import (
    BlockSampler,
    Draft,
    EagleDrafter,
    ExtendedDrafter,
    FirstMatch,
    MaskTokenDrafter,
    ModelDrafter,
    MTPDrafter,
    PromptLookupDrafter,
    Recent,
    RejectionSampler,
    SelfDrafter,
    SpeculativeGenerator,
    SuffixDrafter,
    TopSlots,
    Tree,
)
from specdec.graphs.rows import keep_rows
from specdec.graphs.tree import fill, tables
from specdec.kernels import draw
from specdec.samplers import CouplingSampler, Stream
from specdec.slots.cache import SlotCache, round_up
from specdec.targets.edits.memory import RecurrentCache

FILTERS = {
    "plain": {},
    "filtered": {"temperature": 0.7, "top_k": 12, "top_p": 0.9},
    "greedy": {"temperature": 0},
}
seeds = st.integers(0, 2**32 - 1)


# Law 2.

FEW_ROWS, SMALL_TREE = 1500, Tree(nodes=4, depth=2, top_k=2, rates=(0.5, 0.4))
FINAL = {"has_lm_head": True, "feature_layers": (0, 1, "final"), "draft_vocab_size": 4}


def of_masks(model, name, num_draft_tokens, options, **flags):
    head = mask_head_for(model, name, mask_token_id=5, **flags)
    return MaskTokenDrafter(head, model, num_draft_tokens, **options)


def remembering_samples(model, *, by_prompt=False):
    """A suffix drafter that remembers texts of other seeds than those of the test; by prompt beside
    texts of another one, which would be drafted if rows looked them up.
    """
    drafter, generator = SuffixDrafter(2), SpeculativeGenerator(model, None)
    options = {"do_sample": True, "seed": list(range(10**6, 10**6 + 200))}
    prompts = torch.tensor([PROMPT]).expand(200, -1)
    result = generator.generate(prompts, max_new_tokens=6, **options)
    if by_prompt:
        drafter.remember(result.new_tokens, result.prompts)
        drafter.remember([[0, 0, 0, 0]] * 100, [PROMPT[1:]] * 100)
    else:
        drafter.remember(result.sequences)
    return drafter


OF_TINY = {
    "eagle1": lambda model: EagleDrafter(eagle_head_for(model, kind="input"), model, 2),
    # Cannot propose two of the six ids.
    "p-eagle, fewer ids": lambda model: of_masks(
        model, "p-eagle", 2, {"proposal": "argmax"}, **FINAL
    ),
    "mtp": lambda model: MTPDrafter(mtp_heads.head_for(model, num_depths=2), model, 2),
    # Ends drafts by what was drawn before, which the block rule allows too: a draft of one length
    # is the end of a branch.
    "dspark, sure ones": lambda model: of_masks(
        model, "dspark, markov", 3, {"confidence_threshold": 0.5}, feature_layers=(0, 1)
    ),
    "eagle1, tree": lambda model: EagleDrafter(
        eagle_head_for(model, kind="input"), model, tree=SMALL_TREE
    ),
    "model, tree": lambda model: ModelDrafter(perturbed(model), tree=SMALL_TREE),
    "lookup or model": lambda model: FirstMatch(
        PromptLookupDrafter(1, min_ngram=2), ModelDrafter(perturbed(model), 2)
    ),
    "model, then suffix": lambda model: ExtendedDrafter(
        ModelDrafter(perturbed(model), 1), remembering_samples(model)
    ),
    "suffix": remembering_samples,
    "suffix, prompts": lambda model: remembering_samples(model, by_prompt=True),
    "self, top": lambda model: SelfDrafter(model, 2, visible=Recent(1) + TopSlots(1)),
    "self, recent": lambda model: SelfDrafter(model, 2, visible=Recent(2)),
}
PAIRS = [
    *((name, "truncated" if "fewer" in name else "plain", "auto") for name in OF_TINY),
    ("dspark, sure ones", "plain", RejectionSampler()),
    ("eagle1, tree", "truncated", BlockSampler()),
    ("model, tree", "plain", RejectionSampler()),
    ("model, tree", "truncated", CouplingSampler()),
]


@pytest.mark.parametrize("rows", [FEW_ROWS, pytest.param(ROWS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "logits_filter", "sampler"), PAIRS, ids=str)
def test_texts_have_the_targets_distribution(name, logits_filter, sampler, rows):
    """Chi-square; false-alarm rate and resolution as in `test_sampling_runs`, by default of fewer
    rows.
    """
    result = sample(OF_TINY[name](tiny(TARGET)), sampler, logits_filter, rows)
    for length, p in p_values_of_texts(result, logits_filter).items():
        assert p > ALPHA, f"texts of {length} tokens"
    assert 0.1 < result.stats.acceptance_rate < 0.95  # both branches are exercised


# Law 3.

LENGTHS, NUM_NEW = (1, 4, 6, 9), 24
BATCH, BATCH_MASK = ragged_prompts(VOCAB, *LENGTHS)


def steps_of(result):
    return [[vars(step) for step in row] for row in result.trace]


@cache
def greedy_text_of(model):
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
    return model.generate(BATCH, attention_mask=BATCH_MASK, **options)


def check_greedy_text(model, drafter):
    """HF's text in a ragged batch, and the same steps alone. Returns the batch's result."""
    text = greedy_text_of(model)
    generator = SpeculativeGenerator(model, drafter)
    result = generator.generate(BATCH, BATCH_MASK, max_new_tokens=NUM_NEW, trace=True)
    assert result.sequences.tolist() == text.tolist()
    alone = generator.generate(BATCH[:1, -LENGTHS[0] :], max_new_tokens=NUM_NEW, trace=True)
    assert alone.sequences[0].tolist() == text[0, -LENGTHS[0] - NUM_NEW :].tolist()
    assert steps_of(alone) == steps_of(result)[:1]  # what was drafted, too
    return result


@pytest.mark.smoke
@pytest.mark.parametrize("name", OF_TEXTS)
def test_greedy_text_is_that_of_hf_in_ragged_batches_and_alone(name):
    drafter = make(name)
    result = check_greedy_text(MODEL, drafter)
    few = "itself", "lookup", "suffix", "suffix, prompts", "own", "lookup, tree", *RECURRENT
    if name not in few:
        # Both branches, and rows that go different ways.
        assert 0 < sum(result.stats.accepted) < sum(result.stats.drafted)
        counts = [[step.num_accepted for step in row] for row in result.trace]
        assert any(len(set(of_step)) > 1 for of_step in zip(*counts, strict=False))
    # A row of one token has no features to draft from until the target has read it.
    if not any(match in name for match in ("lookup", "suffix")):
        drafted = [[len(step.draft_tokens) for step in row] for row in result.trace]
        width = drafter.num_draft_tokens
        first = 0 if drafter.feature_layers else width
        assert drafted[0] == [first] + [width] * (len(drafted[0]) - 1)
        assert all(counts == [width] * len(counts) for counts in drafted[1:])


OF_OTHERS = {
    "eagle3": lambda model: EagleDrafter(eagle(model, **WIDE), model, 4),
    "dflash": lambda model: MaskTokenDrafter(masks("dflash", model), model, 4),
    "mtp": lambda model: MTPDrafter(mtp_heads.head_for(model), model, 4),
}


@pytest.mark.parametrize(
    ("target", "name"),
    [("gemma3", "eagle3"), ("gpt_oss", "dflash"), ("deepseek_v3", "mtp")],
)
def test_greedy_text_is_that_of_hf_for_other_targets(target, name):
    model = build(target)
    check_greedy_text(model, OF_OTHERS[name](model))


# Law 5.

SETTINGS = {
    "temperature": [0.7, 1.0, 0.0, 1.3],
    "top_k": [0, 5, 3, 40],
    "top_p": [1.0, 0.9, 0.5, 0.8],
    "min_p": [0.0, 0.0, 0.1, 0.02],
    "seed": [11, 2**64 - 1, 7, 0],
}


@pytest.mark.parametrize("name", OF_TEXTS)
def test_a_proposal_may_be_run_again(name, monkeypatch):
    """As a step is that could not be captured: nothing of it was committed."""
    drafter = make(name)
    options = {"max_new_tokens": 8, "do_sample": True, "seed": [1, 2, 3, 4], "trace": True}
    once = SpeculativeGenerator(MODEL, drafter).generate(BATCH, BATCH_MASK, **options)
    own = type(drafter).propose

    def twice(self, context, state, drawing):
        own(self, context, state, drawing)
        return own(self, context, state, drawing)

    monkeypatch.setattr(type(drafter), "propose", twice)
    again = SpeculativeGenerator(MODEL, drafter).generate(BATCH, BATCH_MASK, **options)
    assert steps_of(again) == steps_of(once)


OTHERS = {
    "eagle3, fewer ids": ({"draft_temperature": 0.6}, "auto"),
    "p-eagle": ({"proposal": "argmax"}, "auto"),
    "mtp": ({}, CouplingSampler()),
}


@pytest.mark.parametrize("name", OF_TEXTS)
def test_a_row_is_the_same_alone_and_in_any_batch_order_padding_and_chunking(name):
    def sampled(generator, rows=(0, 1, 2, 3), ids=BATCH, mask=BATCH_MASK):
        """Every step of the rows, generated together, each with settings of its own."""
        own = {key: [values[row] for row in rows] for key, values in SETTINGS.items()}
        if drafter.tree_depth:
            # A greedy row has another tree among sampled ones than alone; and two ids of one head
            # are equally likely, so that rounding decides which is the last of the top k.
            own["temperature"] = [value or 0.9 for value in own["temperature"]]
            own["top_k"] = [0] * len(rows)
        own |= {"max_new_tokens": 8, "do_sample": True, "trace": True}
        result = generator.generate(ids[list(rows)], mask[list(rows)], **own)
        return dict(zip(rows, steps_of(result), strict=True))

    options, sampler = OTHERS.get(name, ({}, "auto"))
    drafter, alone = make(name, **options), {}
    generator = SpeculativeGenerator(MODEL, drafter, sampler)
    for row, length in enumerate(LENGTHS):
        alone |= sampled(generator, (row,), BATCH[:, -length:], BATCH_MASK[:, -length:])
    assert sampled(generator, (2, 1)) == {row: alone[row] for row in (2, 1)}
    chunked = SpeculativeGenerator(MODEL, drafter, sampler, prefill_chunk_size=2)
    right = to_right_padding(BATCH, BATCH_MASK)
    assert sampled(chunked, (0, 1, 2, 3), *right) == alone
    assert sampled(chunked, (3, 1, 0, 2)) == alone  # over the storage of the call before


# Law 7: drafters that are always right, whatever the steps before have drafted.


def with_and_without_graphs(target, drafter):
    """Two generators, the second of which reads prompts in chunks."""
    chunked = {"graphs": True, "prefill_chunk_size": 3}
    return [SpeculativeGenerator(target, drafter), SpeculativeGenerator(target, drafter, **chunked)]


LONG = ["model, qwen3_5", "model, mamba", "joined, mtp"]


@pytest.fixture(
    scope="module", params=first(ORACLES, [n for n in ORACLES if n not in LONG]), name="generators"
)
def _generators(request):
    return with_and_without_graphs(*ORACLES[request.param]())


def accepted_of(generator, lengths, **options):
    """(length, tokens that each row accepted) of steps, while the drafter knows the text."""
    ids = IDS % generator.target.vocab_size
    generation = generator.start(ids, MASK, max_new_tokens=ROOM, eos_token_id=None, **options)
    room = LEARNED if isinstance(generator.drafter, MaskTokenDrafter) else ROOM
    for length in lengths:
        room -= length + 1
        if room < 0:
            break
        generation.num_draft_tokens = length
        rows = generator.step(generation).fetch().read()
        assert [(row.faults, len(row.draft_tokens)) for row in rows] == [(0, length)] * 2
        yield length, [row.num_accepted for row in rows]


def check_all_are_accepted(generator, lengths, **options):
    for length, accepted in accepted_of(generator, lengths, **options):
        assert accepted == [length] * 2


any_lengths = st.lists(st.integers(0, MOST), min_size=2, max_size=12)


@settings(max_examples=4)
@given(lengths=any_lengths, graphs=st.booleans(), seed=seeds, is_sampled=st.booleans())
def test_a_drafter_that_is_always_right_is_never_rejected(
    generators, lengths, graphs, seed, is_sampled
):
    generator = generators[graphs]
    of_a_text = generator.target.model is MODEL and type(generator.drafter) is not ModelDrafter
    # A draw is lost only where two forwards round apart: odds of about 1e-6 per token.
    options = {"do_sample": True, "seed": seed} if is_sampled and not of_a_text else {}
    check_all_are_accepted(generator, lengths, **options)


def test_steps_without_a_draft_that_are_replayed_read_what_was_committed(generators):
    is_short = isinstance(generators[True].drafter, MaskTokenDrafter)
    check_all_are_accepted(generators[True], [0] * 5 + [1] * 5 if is_short else [MOST, 0] * 8)


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


def with_features(change):
    return lambda c: replace(c, features=change(c.features))


TAMPERING = {
    "features one position late": with_features(lambda f: f.roll(1, dims=1)),
    "features one position early": with_features(lambda f: f.roll(-1, dims=1)),
    "no features": with_features(torch.zeros_like),
    "tokens one position late": lambda c: replace(c, tokens=c.tokens.roll(1, dims=1).clamp(min=0)),
    "a row of a rejected token": lambda c: replace(
        c, tokens=c.tokens.clamp(min=0), num_new=(c.num_new + 1).clamp(max=c.tokens.shape[1])
    ),
}
OF_HEADS = [name for name in ORACLES if name not in ("itself", "scribe")]
CASES = [("eagle3", t) for t in TAMPERING]
CASES += diagonal(["p-eagle", "mtp"], TAMPERING)
CASES += [case([n, "tokens one position late"], n in ONE_OF_EACH) for n in OF_HEADS]


@pytest.mark.parametrize(("name", "tampering"), CASES)
def test_an_oracle_notices_whatever_is_out_of_place(name, tampering):
    """The negative controls: contexts are tampered with on their way to the drafter."""
    target, drafter = ORACLES[name]()
    tamper, family = TAMPERING[tampering], type(drafter)

    class Misled(family):
        def prefill(self, context, state):
            super().prefill(tamper(context), state)

        def propose(self, context, state, drawing):
            return super().propose(tamper(context), state, drawing)

    drafter.__class__ = Misled
    generator = SpeculativeGenerator(target, drafter)
    counts = [n for _, row in accepted_of(generator, [MOST] * 10) for n in row]
    assert sum(counts) < 0.6 * MOST * len(counts)


# Law 8.

OF_DRAFTS = [{}, {"temperature": 0.25, "top_k": 5}, {"min_p": 0.3, "temperature": 1.5}]


def chi_square_p_value(tokens, expected):
    """Of counts against expected counts; ids expected fewer than 5 times share a bin."""
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    rare = expected < 5
    bins = [torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected)]
    bins = [x[bins[1] > 0].numpy() for x in bins]
    return stats.chisquare(*bins, sum_check=False).pvalue


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(case([n, {}], n in ONE_OF_EACH) for n in WITH_LOGITS if n not in RECURRENT),
        pytest.param(
            "model, bamba", {"logits_filter": {"temperature": 1.0}}, marks=pytest.mark.slow
        ),
        ("p-eagle, fewer ids", {"draft_temperature": 0.3}),
        ("mtp", {"draft_temperature": 0.2}),
        *(("model", {"logits_filter": logits_filter}) for logits_filter in OF_DRAFTS),
    ],
    ids=str,
)
@torch.no_grad()
def test_tokens_drawn_many_times_match_the_probabilities_that_come_with_them(name, options):
    """False-alarm rate 1e-9 per check. Distributions half a temperature apart fail it by far."""
    options = dict(options)
    logits_filter = options.pop("logits_filter", {"temperature": 0.25, "top_p": 0.95})
    rows, drafter = 6000 if name == "model" else 2000, make(name, 2, **options)
    loop = loop_of(drafter, [[5, 17, 3, 8]] * rows)
    if isinstance(loop, FeatureLoop):
        loop.table = loop.table[:1].expand(rows, -1, -1)
    state = drafter.init_state(rows, 8, vocab_size=VOCAB, device=torch.device("cpu"))
    loop.prefill(drafter, state, 8)
    draft, _ = propose(drafter, loop, state, logits_filter)
    assert bool((draft.probs.gather(2, draft.tokens[..., None]) > 0).all())
    if "fewer" in name:
        impossible = torch.ones(VOCAB, dtype=torch.bool)
        impossible[drafter.head.target_ids] = False
        assert int(impossible.sum()) == VOCAB - 40
        assert not bool(draft.probs[..., impossible].any())
    for i in range(2):
        probs = draft.probs[:, i].double()
        assert chi_square_p_value(draft.tokens[:, i], probs.sum(0)) > 1e-9
        flat = probs.sqrt() / probs.sqrt().sum(-1, keepdim=True)  # at twice the temperature
        assert chi_square_p_value(draft.tokens[:, i], flat.sum(0)) < 1e-9
    same_first = draft.tokens[:, 0] == draft.tokens[:, 0].mode().values
    probs = draft.probs[same_first, 1].double()
    assert chi_square_p_value(draft.tokens[same_first, 1], probs.sum(0)) > 1e-9


def drafted(name, logits_filter, num_draft_tokens=3, **options):
    """The first draft after three texts."""
    drafter = make(name, num_draft_tokens, **options)
    loop, state = loop_of(drafter, [[3, 1, 4, 1], [9, 2], [6, 5, 3]]), fresh_state(drafter, 3)
    loop.prefill(drafter, state, 8)
    return propose(drafter, loop, state, logits_filter)[0]


@pytest.mark.parametrize("name", first(WITH_LOGITS, [n for n in ONE_OF_EACH if n in WITH_LOGITS]))
@torch.no_grad()
def test_a_proposal_is_drawn_at_its_own_temperature_or_is_the_most_likely_token(name):
    greedy = drafted(name, {"temperature": 0})
    argmax = drafted(name, {"temperature": 1.3}, proposal="argmax")
    assert greedy.probs is None
    assert argmax.probs is None
    assert argmax.tokens.equal(greedy.tokens)
    mixed = drafted(name, {"temperature": [0.0, 1.0, 0.0]}, draft_temperature=3.0)
    assert mixed.tokens[::2].equal(greedy.tokens[::2])
    assert bool(mixed.probs[::2].amax(-1).eq(1).all())
    own = drafted(name, {"temperature": 1.3, "top_k": 20}, 1, draft_temperature=0.5)
    same = drafted(name, {"temperature": 0.5, "top_k": 20}, 1)
    other = drafted(name, {"temperature": 1.3, "top_k": 20}, 1)
    torch.testing.assert_close(own.probs, same.probs, rtol=0, atol=1e-6)
    assert float((own.probs - other.probs).abs().max()) > 0.01


# Law 9.

FEW = 5  # ids of a text, so that lookup finds some


def assert_same(draft, other, where):
    """Equal tokens, and distributions up to rounding."""
    assert draft.tokens[where].equal(other.tokens[where])
    assert (draft.probs is None) == (other.probs is None)
    if draft.probs is not None:
        torch.testing.assert_close(draft.probs[where], other.probs[where], rtol=0, atol=1e-5)


def picked(loop, rows):
    """The same loop over some of its rows."""
    few = copy.copy(loop)
    few.rows, few.num_new = [loop.rows[i] for i in rows], [loop.num_new[i] for i in rows]
    if isinstance(loop, FeatureLoop):
        few.table = loop.table[rows]
    return few


@pytest.mark.parametrize("name", OF_PROPOSALS)
@settings(max_examples=2)
@given(
    seeds,
    st.lists(st.integers(0, 4), min_size=2, max_size=5),
    st.sampled_from(list(FILTERS)),
    *(st.integers(1, 9), st.integers(0, 9), st.sampled_from([-1, 7])),
)
@torch.no_grad()
def test_a_state_built_up_by_drafts_of_any_lengths_proposes_what_a_fresh_one_would(
    name, seed, counts, logits_filter, chunk_size, slack, garbage
):
    drafter, logits_filter = make(name), FILTERS[logits_filter]
    prompts, integer = random_texts(seed, FEW)
    loop, state = loop_of(drafter, prompts, garbage=garbage, slack=slack), fresh_state(drafter, 3)
    loop.prefill(drafter, state, chunk_size)
    for count in counts:
        before = copy.deepcopy(state)
        draft, noise = propose(drafter, loop, state, logits_filter, count=count)
        again, fresh = copy.copy(loop), fresh_state(drafter, 3)  # the text so far is a prompt
        again.num_new = [min(len(row) - 1, 1) for row in loop.rows]
        again.prefill(drafter, fresh, 16)
        expected, _ = propose(drafter, again, fresh, logits_filter, count=count)
        where, found = is_valid(expected), is_valid(draft)
        if drafter.feature_layers:  # a row without anything new has ended
            where &= torch.tensor(loop.num_new)[:, None] > 0
        if name in (*JOINED, EXTENDED):  # one of them may propose something all the same
            found &= torch.tensor(loop.num_new)[:, None] > 0
        assert found.equal(where)
        assert_same(draft, expected, where)
        if draft.probs is not None:
            drawn = draw(draft.probs, noise.uniform(Stream.PROPOSE)[:, : where.shape[1]])
            assert draft.tokens[where].equal(drawn[where])
        # Some of the rows, kept of a copy, go on alike.
        rows = [[2], [2, 1], [0, 2], [0, 1]][integer(0, 3)]
        kept, few = keep_rows(before, rows), picked(loop, rows)
        other, _ = propose(drafter, few, kept, logits_filter, count=count, rows=rows)
        chosen = Draft(draft.tokens[rows], None if draft.probs is None else draft.probs[rows])
        assert_same(other, chosen, where[rows])
        commit_some(loop, draft, count, integer, FEW)


@pytest.mark.parametrize("name", OF_PROPOSALS)
@torch.no_grad()
def test_a_state_that_was_cleared_keeps_its_storage_and_nothing_else(name):
    drafter = make(name)
    state, drafts = fresh_state(drafter, 2), []
    for _ in range(2):
        loop = loop_of(drafter, [[3, 1, 4, 1, 5, 3, 1], [9, 2]])
        loop.prefill(drafter, state, 8)
        drafts.append(propose(drafter, loop, state, {})[0])
        loop_of(drafter, [[6] * 20, [7] * 9], seed=1).prefill(drafter, state, 8)
        before = addresses(state)
        for table in tables(state).values():  # as an overflow in the text before would leave it
            table.fill_(torch.nan if table.is_floating_point() else 10**9)
        fill(state, 0)
        assert addresses(state) == before
    assert_same(*drafts, is_valid(drafts[0]))


@pytest.fixture(scope="module", params=OF_TEXTS, name="others")
def _others(request):
    return with_and_without_graphs(MODEL, make(request.param, MOST))


@settings(max_examples=2)
@given(lengths=any_lengths, graphs=st.booleans())
def test_a_proposal_is_that_of_a_call_that_starts_with_the_text_so_far(others, lengths, graphs):
    generator = others[graphs]
    generation = generator.start(IDS, MASK, max_new_tokens=ROOM, eos_token_id=None)
    for length in lengths:
        generation.num_draft_tokens = length
        generator.step(generation)
    counts, generation.num_draft_tokens = generation.lengths.tolist(), MOST
    found = generator.step(generation).draft
    for row, count in enumerate(counts):
        text = generation.tokens[row : row + 1, :count]
        fresh = generator.start(text, max_new_tokens=ROOM, eos_token_id=None)
        fresh.num_draft_tokens = MOST
        expected = generator.step(fresh).draft
        where = is_valid(expected)[0]
        assert is_valid(found)[row].equal(where)
        assert found.tokens[row][where].equal(expected.tokens[0][where])


# Law 13.


def poison(drafter, state, context, num_in_use):
    """Garbage in every entry that a step has to write before it reads it, and NaN where not even
    a mask may be relied on.
    """
    if isinstance(drafter, FirstMatch | ExtendedDrafter):
        for part, of_part in zip(drafter.drafters, state.parts, strict=True):
            poison(part, of_part, context, num_in_use)
    if isinstance(getattr(state, "tokens", None), torch.Tensor):
        slots = torch.arange(state.tokens.shape[1])
        state.tokens.masked_fill_(slots >= context.start[:, None], 1)
    cache, past = getattr(state, "cache", None), getattr(state, "past", None)
    if isinstance(state, SlotCache):  # a table, which each proposal gathers anew
        for store in state.stores:
            store.fill_(torch.nan)
    if past is not None:
        before = torch.arange(-past.tokens.shape[1], 0) + context.start[:, None] < 0
        past.features[before], past.tokens[before] = torch.nan, 10**9
    if cache is None:
        return
    if isinstance(cache, RecurrentCache):  # what was computed from rejected tokens
        first = context.start + (context.num_new - 1).clamp(min=0)
        num_kept = (first - cache.memory.start)[:, None]
        for tables in cache.memory.records.values():
            for table in tables.values():
                table[torch.arange(table.shape[1]) >= num_kept] = 100.0
    slots = torch.arange(cache.num_slots + 1)
    reach = round_up(num_in_use + max(8, cache.extra_slots))  # no forward attends to more
    for depth in cache.keys:
        first, is_read = context.start, torch.ones_like(context.start, dtype=torch.bool)
        if (
            isinstance(drafter, ModelDrafter) and not drafter.tree
        ):  # it keeps what it computed from accepted tokens
            first = first + (context.num_new - 1).clamp(min=0)
        if past is not None:  # what depends on more than the committed tokens
            root, is_read = context.start + context.num_new, context.num_new > 0
            first = torch.minimum(first, root - depth - 1)
        for table in (cache.keys[depth], cache.values[depth]):
            table.nan_to_num_(nan=1e30)
            table[(slots >= first[:, None]) & is_read[:, None]] = 1e30
            table[:, slots >= reach] = torch.nan


@pytest.mark.parametrize("name", OF_PROPOSALS)
@settings(max_examples=2)
@given(seeds, st.sampled_from(["filtered", "greedy"]))
@torch.no_grad()
def test_what_must_not_be_read_changes_nothing(name, seed, logits_filter):
    """Not one bit: features and tokens of rejected and of missing tokens, slots that are not
    attended to, that are written in this step or hold what was rejected, the padding slot.
    """
    drafter, logits_filter = make(name), FILTERS[logits_filter]
    prompts, integer = random_texts(seed, FEW)
    loop, features = loop_of(drafter, prompts, garbage=0), bool(drafter.feature_layers)
    if features:
        loop.garbage_feature = 0.0
    clean, poisoned = fresh_state(drafter, 3), fresh_state(drafter, 3)
    for state in (clean, poisoned):
        loop.prefill(drafter, state, 4)
    for _ in range(4):
        expected, _ = propose(drafter, loop, clean, logits_filter)
        dirty = copy.copy(loop)
        dirty.garbage = 10**9
        if features:
            dirty.garbage_feature = torch.nan
        context = dirty.context()
        poison(drafter, poisoned, context, loop.num_in_use)
        draft, _ = propose(drafter, loop, poisoned, logits_filter, context=context)
        where = is_valid(expected)
        assert is_valid(draft).equal(where)
        assert draft.tokens[where].equal(expected.tokens[where])
        if draft.probs is not None:
            assert draft.probs[where].equal(expected.probs[where])
        commit_some(loop, draft, 4, integer, FEW)
