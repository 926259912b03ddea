"""`SuffixDrafter` finds what a plain search through lists finds, in the text and in the memory.

The oracle is written from the class's own words. Texts have small alphabets, so that matches of
every length overlap and compete. Laws that all drafters share are in `test_laws.py`.
"""

import random

import pytest
import torch
from drafter_table import MODEL, remembering
from drafting import drawing, ragged_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loop import PlainLoop
from safetensors.torch import save_file

from specdec import PromptLookupDrafter, SpeculativeGenerator, SuffixDrafter
from specdec.drafters.suffix import NUM_COUNTED
from specdec.settings import differences
from specdec.types import PAD_TOKEN

CPU = torch.device("cpu")
tokens = st.integers(0, 2)
texts = st.lists(tokens, min_size=1, max_size=14)
long_texts = st.lists(tokens, min_size=1, max_size=60)
ngrams = st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted)


def kept(memory, max_tokens):
    """The texts of the latest tokens, each of which is followed by a separator."""
    line = [token for text in memory for token in [*text, None]][-max_tokens:]
    found = [[]]
    for token in line:
        found[-1].append(token) if token is not None else found.append([])
    return found


def ends_of(text, ending):
    """Where an n-gram ended in a text that goes on."""
    size = len(ending)
    return [e for e in range(size, len(text)) if text[e - size : e] == ending]


def oracle(text, memory, num_draft_tokens, min_ngram, max_ngram):
    """The continuation with the most expected accepted tokens."""

    def worth(candidate):
        starts = [candidate[:i] for i in range(1, len(candidate) + 1)]
        return sum(other[: len(start)] == start for start in starts for other in found)

    for n in range(min(max_ngram, len(text)), min_ngram - 1, -1):
        ending = text[len(text) - n :]
        own = ends_of(text, ending)
        own.sort(key=lambda e: (min(len(text) - e, num_draft_tokens), e), reverse=True)
        found = [text[e : e + num_draft_tokens] for e in own[:NUM_COUNTED]]
        others = [(t, e) for t in memory for e in ends_of(t, ending)]
        size = len(others)
        if size > NUM_COUNTED:
            others = [others[size - 1 - i * size // NUM_COUNTED] for i in range(NUM_COUNTED)]
        else:
            others = others[::-1]
        found += [t[e : e + num_draft_tokens] for t, e in others]
        if found:
            return max(found, key=worth)
    return []


def proposals(draft):
    """The valid tokens of each row; all other places hold no token."""
    assert draft.probs is None
    rows, counts = draft.tokens.tolist(), draft.num_valid.tolist()
    for row, count in zip(rows, counts, strict=True):
        assert row[count:] == [PAD_TOKEN] * (len(row) - count)
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


def drafts_of(drafter, rows, num_draft_tokens):
    """What follows some texts."""
    state = drafter.init_state(len(rows), 70, vocab_size=3, device=CPU)
    context = PlainLoop(rows, num_draft_tokens).context_from_scratch()
    return proposals(drafter.propose(context, state, drawing(drafter, None, None)))


@settings(max_examples=150)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), ngrams, st.integers(1, 200))
def test_a_proposal_is_what_a_search_through_text_and_memory_finds(
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
    expected = [oracle(text, memory, num_draft_tokens, *ngram) for text in rows]
    assert drafts_of(drafter, rows, num_draft_tokens) == expected


def test_of_more_occurrences_than_are_counted_those_counted_are_spread_over_all():
    """The first half goes on with 1, the latest 16 of 64 with 2."""
    drafter = SuffixDrafter(1)
    drafter.remember([[5, 1]] * 48 + [[5, 2]] * 16)
    assert drafts_of(drafter, [[5]], 1) == [[1]]
    drafter.remember([[5, 2]] * 48)
    assert drafts_of(drafter, [[5]], 1) == [[2]]


@given(long_texts, texts, st.integers(1, 6), st.floats(0.1, 4))
def test_a_match_proposes_at_most_so_many_times_its_length(memory, text, count, factor):
    free, bound = SuffixDrafter(count), SuffixDrafter(count, max_spec_factor=factor)
    for drafter in (free, bound):
        drafter.remember([memory])
    longest = max(
        (
            n
            for n in range(1, 17)
            for t in (text, memory)
            if n <= len(text) and ends_of(t, text[-n:])
        ),
        default=0,
    )
    expected = [row[: int(longest * factor)] for row in drafts_of(free, [text], count)]
    assert drafts_of(bound, [text], count) == expected


def test_without_a_memory_it_finds_matches_where_prompt_lookup_does():
    rows = [[1, 2, 3, 1, 2], [4, 4, 4, 4], [1, 2, 3]]
    expected = drafts_of(PromptLookupDrafter(3, max_ngram=16), rows, 3)
    assert drafts_of(SuffixDrafter(3), rows, 3) == expected == [[3, 1, 2], [4], []]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_text_that_was_remembered_is_drafted_by_the_next_call(graphs):
    """Captured steps find it, too; the text stays HF's."""
    ids, mask = ragged_prompts(MODEL.config.vocab_size, 8, 5)
    drafter = SuffixDrafter(4, max_ngram=8)
    generator = SpeculativeGenerator(MODEL, drafter, graphs=graphs)
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = MODEL.generate(ids, attention_mask=mask, **options).tolist()
    steps = []
    for _ in range(3):
        result = generator.generate(ids, mask, **options)
        assert result.sequences.tolist() == expected
        steps.append(result.stats.steps)
        if len(steps) == 2:
            drafter.remember(row[m.bool()] for row, m in zip(*padded(result, mask), strict=True))
    assert steps[0] == steps[1]
    assert max(steps[2]) == 6 < min(steps[0])  # 30 tokens, 5 of them in a step


def padded(result, mask):
    """The sequences, and a mask of them."""
    new = torch.ones_like(result.new_tokens)
    return result.sequences, torch.cat([mask, new], dim=1)


def test_a_memory_that_was_saved_is_loaded_into_any_size(tmp_path):
    drafter, path = remembering(4), tmp_path / "memory.safetensors"
    drafter.save(path)
    rows = [[5, 0, 1], [2, 3], [4]]
    other = SuffixDrafter(4, max_tokens=400)
    assert differences(drafter.settings(), other.settings())
    other.load(str(path))
    assert drafts_of(other, rows, 4) == drafts_of(drafter, rows, 4)
    assert not differences(drafter.settings(), other.settings())
    small, large = SuffixDrafter(4, max_tokens=50), SuffixDrafter(4, max_tokens=1000)
    for some in (small, large):
        some.load(path)
    assert small.memory.tolist() == drafter.memory[-50:].tolist()
    assert drafts_of(large, rows, 4) == drafts_of(drafter, rows, 4)


def test_what_is_no_memory_is_refused_and_changes_nothing(tmp_path):
    drafter, path = remembering(4), tmp_path / "memory.safetensors"
    before = drafter.memory.clone()
    path.write_bytes(b"not a file of tensors")
    wrong = [path, tmp_path / "none", tmp_path / "other", tmp_path / "floats"]
    save_file({"tokens": before}, wrong[2])
    save_file({"memory": before.float()}, wrong[3])
    for file in wrong:
        with pytest.raises(ValueError, match=r"holds no memory of SuffixDrafter\.save"):
            drafter.load(file)
    with pytest.raises(ValueError, match=r"texts\[1\] has the token id -1; ids are >= 0"):
        drafter.remember([[1, 2], [3, -1]])
    wrong = [[1, 2, 3], [[1, 2], [0.5]], [[[1]]], torch.tensor([1, 2]), [torch.ones(2)], [[10**30]]]
    for texts in (*wrong, ["text"], "text", [["te", "xt"]], [[1, None]], [True], [[]]):
        with pytest.raises(TypeError, match=r"texts\[\d\] must be a list or an int64 tensor \[T\]"):
            drafter.remember(texts)
    assert drafter.memory.equal(before)


def test_a_memory_of_another_place_or_tokenizer_is_refused():
    drafter = remembering(4)
    with pytest.raises(ValueError, match=r"the memory is on cpu and the target on meta"):
        drafter.validate(vocab_size=400, device=torch.device("meta"))
    with pytest.raises(ValueError, match="a vocabulary of 7; its texts were made with another"):
        drafter.validate(vocab_size=7, device=CPU)


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
    with pytest.raises(ValueError, match=rf"texts\[1\] {message}"):
        drafter.remember([[1], [2, size]])
    with pytest.raises(ValueError, match=f"memory.safetensors {message}"):
        drafter.load(path)
    assert drafter.memory.equal(before)
    assert sum(len(record.rows[0].new_tokens) for record in stream if record.rows[0]) > 0
    with pytest.raises(ValueError, match=f"the memory {message}.* load.. replaces a memory"):
        SpeculativeGenerator(MODEL, other)
    drafter.save(path)
    other.load(path)
    SpeculativeGenerator(MODEL, other)


@pytest.mark.parametrize("options", [{"max_ngram": 10**7}, {"max_tokens": 10**12}])
def test_tables_that_no_memory_holds_are_refused_with_their_size(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=rf"{name}={value} .*take \d+\.\d GiB, and cpu has \d+"):
        SuffixDrafter(4, **options)


@pytest.mark.parametrize(
    "options", [{"max_tokens": 0}, {"max_spec_factor": 0}, {"max_ngram": 0}, {"min_ngram": 17}]
)
def test_a_number_out_of_range_is_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SuffixDrafter(4, **options)
