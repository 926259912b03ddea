"""`FirstMatch` proposes what the first of its drafters proposes that proposes anything, with the
probabilities that it was drawn from; `ExtendedDrafter` a draft and what a search through lists
finds after it. Laws that all drafters share are in `test_laws.py`.
"""

import pytest
import torch
from architectures import VOCAB, build
from drafter_table import (
    MODEL,
    commit_some,
    fresh_state,
    loop_of,
    make,
    propose,
    random_texts,
)
from drafting import drawing, ragged_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from test_ngrams import looked_up

from examples.online_distillation import KeepVerified
from specdec import (
    Context,
    Draft,
    ExtendedDrafter,
    FirstMatch,
    ModelDrafter,
    NoDrafter,
    PromptLookupDrafter,
    SpeculativeGenerator,
    Tree,
)
from specdec.samplers import LogitsFilter, Noise
from specdec.settings import differences

seeds = st.integers(0, 2**32 - 1)
SAMPLED = {"temperature": [0.7, 0.0, 1.3]}
PAIRS = {
    "lookup, model": lambda: [PromptLookupDrafter(5, max_ngram=2), make("model", 3)],
    "lookup, eagle3": lambda: [PromptLookupDrafter(2, max_ngram=2), make("eagle3", 4)],
    "lookup, mtp": lambda: [PromptLookupDrafter(3, max_ngram=2), make("mtp", 3)],
    "eagle3, model": lambda: [make("eagle3", 4), make("model", 2)],
    "suffix, lookup": lambda: [make("suffix", 3), PromptLookupDrafter(4)],
}


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=4)
@given(st.integers(0, 2**32 - 1), st.sampled_from([SAMPLED, {"temperature": 0}]), st.data())
@torch.no_grad()
def test_each_row_has_the_first_draft_with_a_token_and_its_probabilities(
    name, seed, logits_filter, data
):
    parts = PAIRS[name]()
    joined = FirstMatch(*parts)
    assert joined.num_draft_tokens == max(part.num_draft_tokens for part in parts)
    prompts, integer = random_texts(seed, 5)
    loop, state = loop_of(joined, prompts), fresh_state(joined, 3)
    loop.prefill(joined, state, 4)
    for _ in range(4):
        count = data.draw(st.integers(1, joined.num_draft_tokens))
        draft, _ = propose(joined, loop, state, logits_filter, count=count)
        drafts = []
        for part in parts:  # each alone reads the whole text anew
            again, own = loop_of(part, loop.rows), fresh_state(part, 3)
            again.prefill(part, own, 4)
            size = min(count, part.num_draft_tokens)
            drafts.append(propose(part, again, own, logits_filter, count=size)[0])
        assert draft.tokens.shape == (3, count)
        assert (draft.probs is None) == all(part.probs is None for part in drafts)
        for row in range(3):
            if loop.num_new[row] < again.num_new[row]:  # it has ended
                continue
            sizes = [
                part.tokens.shape[1] if part.num_valid is None else int(part.num_valid[row])
                for part in drafts
            ]
            chosen = next((i for i, size in enumerate(sizes) if size), len(sizes) - 1)
            size, own = sizes[chosen], drafts[chosen]
            assert int(draft.num_valid[row]) == size
            assert draft.tokens[row, :size].equal(own.tokens[row, :size])
            if draft.probs is None:
                continue
            expected = torch.nn.functional.one_hot(own.tokens[row, :size].clamp(min=0), VOCAB)
            if own.probs is not None:
                expected = own.probs[row, :size]
            torch.testing.assert_close(draft.probs[row, :size], expected.to(draft.probs))
        commit_some(loop, draft, count, integer, 5)


def test_a_batch_has_rows_of_both_kinds():
    """Otherwise the test above would show little."""
    joined = FirstMatch(PromptLookupDrafter(3, min_ngram=2), make("model", 3))
    loop, state = loop_of(joined, [[1, 2, 3, 1, 2], [1, 2, 3, 4, 5]]), fresh_state(joined, 2)
    loop.prefill(joined, state, 9)
    probs = propose(joined, loop, state, {"temperature": 1.0})[0].probs
    assert probs.amax(2).eq(1).all(1).tolist() == [True, False]
    assert propose(joined, loop, state, {"temperature": 1.0})[0].tokens[0].tolist() == [3, 1, 2]


FIRST = {
    "model": lambda: make("model", 3),
    "eagle3": lambda: make("eagle3", 2),
    "lookup": lambda: PromptLookupDrafter(2, min_ngram=2),  # drafts of any length, and point masses
}


@pytest.mark.parametrize("name", FIRST)
@settings(max_examples=6)
@given(
    seeds,
    st.sampled_from([SAMPLED, {"temperature": 0}]),
    *(st.integers(1, 3), st.sampled_from([(1, 1), (1, 3), (2, 2)]), st.data()),
)
@torch.no_grad()
def test_a_lookup_goes_on_where_a_draft_ends(name, seed, logits_filter, width, ngram, data):
    first = FIRST[name]()
    lookup = PromptLookupDrafter(width, min_ngram=ngram[0], max_ngram=ngram[1])
    drafter, k1 = ExtendedDrafter(first, lookup), first.num_draft_tokens
    assert drafter.num_draft_tokens == k1 + width
    prompts, integer = random_texts(seed, 3)
    loop, state = loop_of(drafter, prompts), fresh_state(drafter, 3)
    loop.prefill(drafter, state, 4)
    for _ in range(4):
        count = data.draw(st.integers(1, k1 + width))
        draft, _ = propose(drafter, loop, state, logits_filter, count=count)
        again, own = loop_of(first, loop.rows), fresh_state(first, 3)  # alone, the whole text anew
        again.prefill(first, own, 4)
        alone, _ = propose(first, again, own, logits_filter, count=min(count, k1))
        assert draft.tokens.shape == (3, count)
        assert (draft.probs is None) == (alone.probs is None)
        for row, size in enumerate(alone.is_valid.sum(1).tolist()):
            if loop.num_new[row] < again.num_new[row]:  # it has ended
                continue
            head = alone.tokens[row, :size].tolist()
            room = count - min(count, k1)
            after = looked_up(loop.rows[row] + head, room, *ngram) if room else []
            valid = int(draft.num_valid[row])
            assert draft.tokens[row, :valid].tolist() == [*head, *after]
            if draft.probs is not None:
                expected = torch.eye(VOCAB)[[*head, *after]]
                expected[:size] = alone.probs[row, :size]
                torch.testing.assert_close(draft.probs[row, : len(expected)], expected)
        commit_some(loop, draft, count, integer, 3)


def test_what_a_lookup_adds_is_accepted_and_has_no_probability_of_the_head():
    """The target drafts for itself; its greedy text soon repeats a few tokens."""
    ids, mask = ragged_prompts(VOCAB, 5, 9)
    options = {"max_new_tokens": 40, "eos_token_id": None}
    lookup = PromptLookupDrafter(3, min_ngram=2)
    results = [
        SpeculativeGenerator(MODEL, drafter).generate(ids, mask, trace=True, **options)
        for drafter in (make("itself", 2), ExtendedDrafter(make("itself", 2), lookup))
    ]
    assert results[0].sequences.equal(results[1].sequences)
    assert len(results[1].trace.numbers[0]) < len(results[0].trace.numbers[0])
    counts = {s.num_accepted for row in results[1].steps for s in row}
    assert max(counts) > 2
    pairs = zip(results[1].steps, results[1].trace.numbers, strict=True)
    for step, numbers in ((s, n) for row in pairs for s, n in zip(*row, strict=True)):
        assert (numbers.raw_draft_probs is None) == (len(step.draft_tokens) > 2)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_setting_of_a_part_holds_from_the_next_call_on(graphs):
    ids, mask = ragged_prompts(VOCAB, 5, 9)

    def steps_of(generator):
        result = generator.generate(ids, mask, max_new_tokens=24, eos_token_id=None)
        return [[vars(step) for step in row] for row in result.steps]

    def join(min_ngram):
        lookup = PromptLookupDrafter(4, min_ngram=min_ngram, max_ngram=30)
        return FirstMatch(lookup, make("eagle3", 4))

    drafter = join(30)
    generator = SpeculativeGenerator(MODEL, drafter, graphs=graphs)
    expected = [steps_of(SpeculativeGenerator(MODEL, join(n))) for n in (30, 1)]
    assert expected[0] != expected[1]
    assert steps_of(generator) == expected[0]
    drafter.drafters[0].min_ngram = 1
    assert steps_of(generator) == expected[1]
    assert not differences(join(1).settings(), drafter.settings())


def test_settings_and_memory_are_those_of_all_drafters():
    assert not differences(make("lookup or eagle3").settings(), make("lookup or eagle3").settings())
    one, other = (FirstMatch(PromptLookupDrafter(4, max_ngram=n), make("mtp")) for n in (2, 3))
    assert one.settings() != other.settings()
    assert one.settings()["drafters"][0]["max_ngram"] == 2
    # What follows from the drafters is no setting, or files of before could not be gone on with.
    assert not {"reads_target", "row_inputs"} & one.settings().keys()
    assert FirstMatch(PromptLookupDrafter(), Odd()).has_memory
    assert not make("lookup or eagle3").has_memory


class Odd(NoDrafter):
    """Remembers, and makes states that nobody can use."""

    num_draft_tokens, has_memory = 2, True

    def init_state(self, *sizes, **target):
        return object()


def of_size(number, drafter=None):
    (drafter or make("lookup or eagle3")).num_draft_tokens = number


LOOKUP = PromptLookupDrafter(4)
TREE = Tree(nodes=4, depth=2, top_k=2)
ONE_DRAFTER = "joins two drafters or more, got"
REFUSED = [
    (lambda: FirstMatch(), ONE_DRAFTER),
    (lambda: FirstMatch(LOOKUP), ONE_DRAFTER),
    (lambda: FirstMatch(LOOKUP, "eagle3"), "got a str"),
    (lambda: FirstMatch(LOOKUP, PromptLookupDrafter(6, num_continuations=2)), "of tree_depth=3"),
    (lambda: FirstMatch(LOOKUP, ModelDrafter(MODEL, tree=TREE)), "a ModelDrafter of tree_depth=2"),
    (lambda: FirstMatch(LOOKUP, NoDrafter()), "NoDrafter .. num_draft_tokens=0"),
    (lambda: FirstMatch(LOOKUP, PromptLookupDrafter(0)), "Lookup .. num_draft_tokens=0"),
    (
        lambda: make("lookup or eagle3").validate(vocab_size=7, device=torch.device("cpu")),
        "the head was made for a vocabulary",
    ),
    (lambda: fresh_state(FirstMatch(LOOKUP, Odd()), 1), "Odd.init_state returned state = a object"),
    (lambda: ExtendedDrafter(LOOKUP, make("model")), "by a PromptLookupDrafter .. a ModelDrafter"),
    (lambda: ExtendedDrafter(LOOKUP, PromptLookupDrafter(6, num_continuations=2)), "tree_depth=3"),
    (lambda: of_size(1, ExtendedDrafter(LOOKUP, LOOKUP)), "ExtendedDrafter.num_draft_tokens"),
    (lambda: of_size(-1), "FirstMatch.num_draft_tokens"),
    (lambda: of_size(2.0), "FirstMatch.num_draft_tokens"),
]


@pytest.mark.parametrize(("join", "message"), REFUSED)
def test_what_cannot_be_joined_is_refused_by_name(join, message):
    with refused(message):
        join()


class Knows(NoDrafter):
    """Drafts the text at some lengths of it, and nothing at others."""

    def __init__(self, text, num_draft_tokens):
        super().__init__()
        self.text, self.num_draft_tokens = text, num_draft_tokens

    def propose(self, context, state, drawing):
        length, count = context.num_committed[:, None], drawing.num_draft_tokens
        index = (length + torch.arange(count)).clamp(max=self.text.shape[1] - 1)
        tokens = self.text.expand(len(length), -1).gather(1, index)
        return Draft(tokens, None, torch.where(length[:, 0] * 7 % 5 < 3, count, 0))


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("name", ["llama", pytest.param("mamba", marks=pytest.mark.swept)])
def test_a_draft_model_reads_what_others_drafted(name, keeps):
    """The target drafts for itself behind a drafter that is always right: all is accepted."""
    model, ids = (
        build(name),
        torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(0)),
    )
    options = {"do_sample": False, "eos_token_id": []}
    plain = SpeculativeGenerator(model, None).generate(ids, max_new_tokens=60, **options)
    own = ModelDrafter(model, 2)
    drafter = FirstMatch(Knows(plain.sequences, 7), KeepVerified(own, top_k=4) if keeps else own)
    found = SpeculativeGenerator(model, drafter).generate(ids, max_new_tokens=40, **options)
    assert found.sequences.equal(plain.sequences[:, : ids.shape[1] + 40])
    drafted = [len(step.draft_tokens) for step in found.steps[0]]
    assert set(drafted) == {2, 7}
    assert [step.num_accepted for step in found.steps[0]] == drafted
    if keeps:  # of longer drafts its own number of tokens
        tokens, _, _, rows = drafter.drafters[1].kept(torch.arange(len(drafted)))
        assert set(rows.tolist()) == {3}
        text = plain.sequences[0].tolist()
        windows = [[t - 1 for t in window if t] for window in tokens.tolist()]
        assert all(window == text[: len(window)] for window in windows)


def test_a_draft_model_refuses_more_new_tokens_than_it_reads():
    drafter = ModelDrafter(MODEL, 2)
    state, text = fresh_state(drafter, 1), torch.arange(9)[None]
    context = Context(text, None, torch.tensor([0]), torch.tensor([8]))
    told = drawing(drafter, LogitsFilter(1, temperature=0), Noise([0]).at(torch.tensor([8]), 3))
    with pytest.raises(ValueError, match=r"2 tokens of its own draft.*got 8 tokens after.*prefill"):
        drafter.propose(context, state, told)


def test_no_drafter_of_a_join_can_be_told_to_draft_nothing():
    drafter = FirstMatch(make("lookup"), make("suffix"))
    with pytest.raises(ValueError, match=r"FirstMatch.num_draft_tokens must be.*1.*got 0"):
        drafter.num_draft_tokens = 0
    assert drafter.num_draft_tokens == 4
