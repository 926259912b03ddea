"""`PromptLookupDrafter` and `SuffixDrafter` find what a plain search through lists finds: in the
text, however it arrived, and in the memory.

The oracles are written from the classes' own words. Texts have small alphabets, so that matches of
every length overlap and compete. Laws that all drafters share are in `test_laws.py`.
"""

import random

import pytest
import torch
from drafter_table import CPU, MODEL, remembering
from drafting import drawing, ragged_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loop import PlainLoop
from refusals import refused
from safetensors.torch import load_file, save_file

from specdec import PromptLookupDrafter, SpeculativeGenerator, SuffixDrafter
from specdec.drafters.suffix import NUM_COUNTED
from specdec.settings import differences
from specdec.types import PAD_TOKEN

tokens = st.integers(0, 2)
texts = st.lists(tokens, min_size=1, max_size=14)
batches = st.lists(texts, min_size=1, max_size=4)
long_texts = st.lists(tokens, min_size=1, max_size=60)
ngrams = st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted)
counts = st.integers(0, 4)


def ends_of(text, ending):
    """Where an n-gram ended in a text that goes on."""
    size = len(ending)
    return [e for e in range(size, len(text)) if text[e - size : e] == ending]


def endings(text, min_ngram, max_ngram):
    """The n-grams that end a text, the longest first."""
    return [text[-n:] for n in range(min(max_ngram, len(text)), min_ngram - 1, -1)]


def looked_up(text, num_draft_tokens, *ngram):
    """What followed the best earlier occurrence of the longest n-gram that ends the text."""
    for ending in endings(text, *ngram):
        if follows := ends_of(text, ending):
            best = max(follows, key=lambda e: (min(len(text) - e, num_draft_tokens), e))
            return text[best : best + num_draft_tokens]
    return []


def kept(memory, max_tokens):
    """The texts of the latest tokens, each of which is followed by a separator."""
    found = [[]]
    for token in [token for text in memory for token in [*text, None]][-max_tokens:]:
        found[-1].append(token) if token is not None else found.append([])
    return found


def remembered(text, memory, num_draft_tokens, *ngram):
    """The continuation with the most expected accepted tokens."""

    def worth(candidate):
        starts = [candidate[:i] for i in range(1, len(candidate) + 1)]
        return sum(other[: len(start)] == start for start in starts for other in found)

    for ending in endings(text, *ngram):
        own = ends_of(text, ending)
        own.sort(key=lambda e: (min(len(text) - e, num_draft_tokens), e), reverse=True)
        found = [text[e : e + num_draft_tokens] for e in own[:NUM_COUNTED]]
        others = [(t, e) for t in memory for e in ends_of(t, ending)][::-1]
        if (size := len(others)) > NUM_COUNTED:
            others = [others[i * size // NUM_COUNTED] for i in range(NUM_COUNTED)]
        found += [t[e : e + num_draft_tokens] for t, e in others]
        if found:
            return max(found, key=worth)
    return []


def proposals(drafter, context, state):
    """The valid tokens of each row; all other places hold no token."""
    draft = drafter.propose(context, state, drawing(drafter, None, None))
    assert draft.probs is None
    rows, sizes = draft.tokens.tolist(), draft.num_valid.tolist()
    for row, count in zip(rows, sizes, strict=True):
        assert row[count:] == [PAD_TOKEN] * (len(row) - count)
    return [row[:count] for row, count in zip(rows, sizes, strict=True)]


def drafts_of(drafter, rows, count=4):
    """What follows some texts."""
    state = drafter.init_state(len(rows), 70, vocab_size=3, device=CPU)
    return proposals(drafter, PlainLoop(rows, count).context_from_scratch(), state)


@given(st.data(), batches, counts, ngrams, st.integers(1, 6), st.integers(0, 5))
def test_lookup_finds_what_a_search_through_the_text_does_however_it_arrived(
    data, texts, num_draft_tokens, ngram, chunk_size, slack
):
    drafter = PromptLookupDrafter(num_draft_tokens, min_ngram=ngram[0], max_ngram=ngram[1])
    state = drafter.init_state(len(texts), 40, vocab_size=3, device=CPU)
    expected = [looked_up(text, num_draft_tokens, *ngram) for text in texts]
    assert drafts_of(drafter, texts, num_draft_tokens) == expected
    garbage = data.draw(st.integers(-1, 2))
    loop = PlainLoop(texts, num_draft_tokens, garbage=garbage, slack=slack)
    loop.prefill(drafter, state, chunk_size)
    block = st.lists(tokens, max_size=num_draft_tokens + 1)  # [] is a row that ended
    for _ in range(3):
        expected = [looked_up(text, num_draft_tokens, *ngram) for text in loop.rows]
        assert proposals(drafter, loop.context(), state) == expected
        loop.commit([data.draw(block) for _ in texts])


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), ngrams, st.integers(1, 200))
def test_suffixes_are_what_a_search_through_text_and_memory_finds(
    seed, num_draft_tokens, ngram, max_tokens
):
    """Drawn by seeds, since hypothesis prefers short lists."""
    source = random.Random(seed)
    ids = source.randint(2, 4)

    def some_texts(most, longest):
        sizes = [source.randint(1, longest) for _ in range(source.randint(1, most))]
        return [[source.randrange(ids) for _ in range(size)] for size in sizes]

    options = {"min_ngram": ngram[0], "max_ngram": ngram[1], "max_tokens": max_tokens}
    drafter, texts = SuffixDrafter(num_draft_tokens, **options), []
    for _ in range(source.randint(0, 3)):
        texts += (new := some_texts(4, source.choice([3, 12, 60])))
        drafter.remember(new)
    rows, memory = some_texts(4, source.choice([3, 12, 60])), kept(texts, max_tokens)
    expected = [remembered(text, memory, num_draft_tokens, *ngram) for text in rows]
    assert drafts_of(drafter, rows, num_draft_tokens) == expected


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), ngrams, st.integers(1, 120))
def test_rows_look_up_what_followed_the_longest_prompt_that_they_begin_with(
    seed, ngram, max_tokens
):
    """Texts without a prompt are of the empty one, with which every row begins."""
    source, longest = random.Random(seed), ngram[1]

    def some_texts(count, most):
        sizes = [source.randint(1, most) for _ in range(count)]
        return [[source.randrange(2) for _ in range(size)] for size in sizes]

    options = {"min_ngram": ngram[0], "max_ngram": longest, "max_tokens": max_tokens}
    drafter, texts, owners = SuffixDrafter(3, **options), [], []
    for _ in range(3):
        new, prompts = some_texts(4, 20), [*some_texts(3, 3), []]
        drafter.remember(new[:3], prompts[:3])
        drafter.remember(new[3:])
        texts += [p[-longest:] + text for p, text in zip(prompts, new, strict=True)]
        owners += prompts
    memory = kept(texts, max_tokens)  # the last one is empty
    owners = [*owners[len(owners) - len(memory) + 1 :], None]
    known = [o for o, text in zip(owners, memory, strict=True) if o is not None]
    rows, expected = some_texts(4, 20), []
    for row in rows:
        own = max((o for o in [[], *known] if row[: len(o)] == o), key=len)
        found = [text for o, text in zip(owners, memory, strict=True) if o == own]
        expected.append(remembered(row, found, 3, *ngram))
    assert drafts_of(drafter, rows, 3) == expected


def test_of_more_occurrences_than_are_counted_those_counted_are_spread_over_all():
    """The first half goes on with 1, the latest 16 of 64 with 2."""
    drafter = SuffixDrafter(1)
    drafter.remember([[5, 1]] * 48 + [[5, 2]] * 16)
    assert drafts_of(drafter, [[5]], 1) == [[1]]
    drafter.remember([[5, 2]] * 48)
    assert drafts_of(drafter, [[5]], 1) == [[2]]


@pytest.mark.parametrize("by_prompt", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_text_that_was_remembered_is_drafted_by_the_next_call(graphs, by_prompt):
    """Captured steps find it, too; the text stays HF's."""
    ids, mask = ragged_prompts(MODEL.config.vocab_size, 8, 5)
    drafter, steps = SuffixDrafter(4, max_ngram=8), []
    generator = SpeculativeGenerator(MODEL, drafter, graphs=graphs)
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = MODEL.generate(ids, attention_mask=mask, **options).tolist()
    for _ in range(3):
        result = generator.generate(ids, mask, **options)
        assert result.sequences.tolist() == expected
        steps.append(result.stats.steps)
        if len(steps) == 2 and by_prompt:
            drafter.remember(result.new_tokens, result.prompts)
        elif len(steps) == 2:
            starts = (mask == 0).sum(dim=1).tolist()
            rows = zip(result.sequences, starts, strict=True)
            drafter.remember(row[start:] for row, start in rows)
    assert steps[0] == steps[1]
    assert max(steps[2]) == 6 < min(steps[0])  # 30 tokens, 5 of them in a step


@pytest.mark.parametrize("with_prompts", [False, True])
def test_a_memory_that_was_saved_is_loaded_into_any_size(with_prompts, tmp_path):
    drafter, path = remembering(4, with_prompts), tmp_path / "memory.safetensors"
    drafter.save(path)
    assert load_file(path).keys() == {"memory"} | ({"prompts"} if with_prompts else set())
    rows, same = [[5, 0, 1], [2, 3], [4], [0, 2, 5]], drafter.max_tokens
    other, small, large = (SuffixDrafter(4, max_tokens=n) for n in (same, 50, 5000))
    assert differences(drafter.settings(), other.settings())
    for each in (other, small, large):
        each.load(str(path))
    assert not differences(drafter.settings(), other.settings())
    assert small.memory.tolist() == drafter.memory[-50:].tolist()
    for each in (other, large):
        assert drafts_of(each, rows) == drafts_of(drafter, rows)


# Refusals.

NO_TEXTS = [[1, 2, 3], [[1, 2], [0.5]], [[[1]]], torch.tensor([1, 2]), [torch.ones(2)], [[10**30]]]
NO_TEXTS += [["text"], "text", [["te", "xt"]], [[1, None]], [True], [[]]]


def test_what_is_no_memory_is_refused_and_changes_nothing(tmp_path):
    names = "a", "none", "other", "floats", "shorter"
    drafter, wrong = remembering(4), [tmp_path / name for name in names]
    before = drafter.memory.clone()
    wrong[0].write_bytes(b"not a file of tensors")
    save_file({"tokens": before}, wrong[2])
    save_file({"memory": before.float()}, wrong[3])
    save_file({"memory": before, "prompts": before[1:].clone()}, wrong[4])
    for file in wrong:
        with refused("holds no memory of SuffixDrafter.save"):
            drafter.load(file)
    with refused("texts[1] has the token id -1; ids are >= 0"):
        drafter.remember([[1, 2], [3, -1]])
    with refused("prompts[1] has the token id -1; ids are >= 0"):
        drafter.remember([[1, 2], [3]], [[1], [-1]])
    with refused("prompts must be one for each text, got 1 for 2 texts; leave them out"):
        drafter.remember([[1, 2], [3]], [[1]])
    with refused("prompts[1] must be a list or an int64 tensor [T]"):
        drafter.remember([[1, 2], [3]], [[1], "text"])
    for texts in NO_TEXTS:
        with refused("texts[ .. ] must be a list or an int64 tensor [T]"):
            drafter.remember(texts)
    with refused("the memory is on cpu and the target on meta"):
        drafter.validate(vocab_size=400, device=torch.device("meta"))
    with refused("a vocabulary of 7; its texts were made with another"):
        drafter.validate(vocab_size=7, device=CPU)
    assert drafter.memory.equal(before)


def test_texts_of_another_tokenizer_are_refused_before_a_stream_could_draft_them(tmp_path):
    """Once a generator has named the vocabulary. What is refused leaves the memory as it was."""
    size, drafter = MODEL.config.vocab_size, remembering(4)
    other, path = SuffixDrafter(4), tmp_path / "memory.safetensors"
    other.remember([[1, 2, size]])  # of no target yet
    other.save(path)
    before, generator = drafter.memory.clone(), SpeculativeGenerator(MODEL, drafter)
    stream = generator.stream(torch.tensor([[1, 2, 3]]), max_new_tokens=9, eos_token_id=None)
    next(stream)
    message = f"has the token id {size} and the target a vocabulary of {size}; its texts were made"
    with refused(f"texts[1] {message}"):
        drafter.remember([[1], [2, size]])
    with refused(f"prompts[0] {message}"):
        drafter.remember([[1]], [[size]])
    with refused(f"memory.safetensors {message}"):
        drafter.load(path)
    assert drafter.memory.equal(before)
    assert sum(len(record.rows[0].new_tokens) for record in stream if record.rows[0]) > 0
    with refused(f"the memory {message} .. load() replaces a memory"):
        SpeculativeGenerator(MODEL, other)
    drafter.save(path)
    other.load(path)
    SpeculativeGenerator(MODEL, other)


NUMBERS = [
    (PromptLookupDrafter, {"min_ngram": 0, "max_ngram": 3}, "min_ngram"),
    (PromptLookupDrafter, {"min_ngram": 3, "max_ngram": 2}, "min_ngram"),
    (PromptLookupDrafter, {"min_ngram": -1, "max_ngram": 1}, "min_ngram"),
    (SuffixDrafter, {"max_tokens": 0}, "max_tokens"),
    (SuffixDrafter, {"max_ngram": 0}, "max_ngram"),
    (SuffixDrafter, {"min_ngram": 17}, "min_ngram"),
    (SuffixDrafter, {"max_ngram": 10**7}, "max_ngram=10000000 .. take .. GiB, and cpu has"),
    (SuffixDrafter, {"max_tokens": 10**12}, "max_tokens=1000000000000 .. take .. GiB, and cpu has"),
]


@pytest.mark.parametrize(("drafter", "options", "message"), NUMBERS)
def test_numbers_out_of_range_and_tables_that_no_memory_holds_are_refused(
    drafter, options, message
):
    with refused(message):
        drafter(4, **options)
