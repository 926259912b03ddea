"""Text to training rows: what is read, how it is packed, and that a place can be returned to."""

import json
import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from specdec import zoo
from specdec.lab.training import PackedStream, beginning_of, encode_texts
from specdec.lab.training.data import hold_out, read_texts

TOKENIZER = zoo.load_tokenizer()
CHAT = zoo.load_tokenizer()
CHAT.chat_template = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def lines(path, *entries):
    """A JSONL file; entries that are text already are written as they are."""
    rows = [e if isinstance(e, str) else json.dumps(e, ensure_ascii=False) for e in entries]
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def test_a_text_file_is_one_document_without_its_byte_order_mark(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\n\ntwo \xc3\xa9 \xff\n")
    assert list(read_texts(path, TOKENIZER)) == ["one\n\ntwo é \ufffd\n"]


def test_every_line_of_a_jsonl_file_is_a_document(tmp_path):
    path = lines(
        tmp_path / "a.jsonl",
        {"text": "first", "messages": "ignored beside a text"},
        "   ",
        {"messages": TURNS, "id": 3},
        {"conversations": TURNS[:1]},
        {"text": ""},
        {"turns": ["a question", "and another"], "question_id": 81},
        {"turns": TURNS},
    )
    expected = ["first", "<user>hi<assistant>ho", "<user>hi", "", "a question\n\nand another"]
    expected.append("<user>hi<assistant>ho")
    assert list(read_texts(str(path), CHAT)) == expected


def test_characters_that_python_takes_for_ends_of_lines_do_not_end_a_document(tmp_path):
    texts = [f"a{mark}b" for mark in "\u2028\u2029\x85\x0b\x0c\x1c\r\n"]
    path = lines(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    assert list(read_texts(path, TOKENIZER)) == texts
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert list(read_texts(path, TOKENIZER)) == texts


def test_a_folder_is_all_its_files_in_order_but_for_hidden_ones(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "c.txt").write_text("third")
    lines(tmp_path / "a.jsonl", {"text": "first"})
    (tmp_path / "b" / "x.py").write_text("second")
    (tmp_path / ".git" / "config").write_text("no")
    (tmp_path / ".DS_Store").write_text("no")
    assert list(read_texts(tmp_path, TOKENIZER)) == ["first", "second", "third"]


BAD_LINES = {
    "is no JSON in UTF-8: Unterminated string": '{"text": "a',
    "is no JSON in UTF-8: .*recursion": '{"text": ' + 200_000 * "[" + 200_000 * "]" + "}",
    r"'messages' of 'role' and 'content', got \['text'\]": ["text"],
    "with 'turns' of texts": {"turns": [1, 2]},
    "must be an object with 'text'": {"text": 3, "messages": []},
    "'role' and 'content'": {"conversations": [{"from": "human", "value": "a"}]},
    "no tools here": {"messages": [{"role": "tool", "content": ""}]},
}


@pytest.mark.parametrize("message", BAD_LINES)
def test_a_line_that_is_no_document_is_named(tmp_path, message):
    path = lines(tmp_path / "bad.jsonl", {"text": "good"}, "", BAD_LINES[message])
    texts = read_texts(path, CHAT)
    assert next(texts) == "good"
    with pytest.raises(ValueError, match=rf"bad\.jsonl, line 3.*{message}"):
        next(texts)


def test_bytes_that_are_no_text_and_a_missing_template_are_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 1 is no JSON in UTF-8"):
        list(read_texts(path, TOKENIZER))
    lines(path, {"messages": TURNS})
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 1.*no chat template"):
        list(read_texts(path, TOKENIZER))
    with pytest.raises(FileNotFoundError, match=r"no training data at .*nowhere"):
        list(read_texts(tmp_path / "nowhere", TOKENIZER))


@given(st.lists(st.text("ab \n\t(é中\U0001f600", max_size=20), max_size=7), st.integers(1, 4))
def test_documents_are_the_texts_each_closed_by_the_end_token(texts, chunk_size):
    documents = encode_texts(iter(texts), TOKENIZER, chunk_size=chunk_size)
    ends = [ids[-1] for ids in documents]
    assert ends == [TOKENIZER.eos_token_id] * len(texts)
    assert [TOKENIZER.decode(ids[:-1].tolist()) for ids in documents] == texts
    assert {ids.dtype for ids in documents} <= {np.dtype(np.uint16)}


def beginning_with(names, after=""):
    """The zoo's tokenizer, which puts special tokens before a text, and perhaps one after it."""
    tokenizer = zoo.load_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    special = {*names, after} - {""}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=" ".join([*names, "$A", after]).strip(),
        special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in special],
    )
    return tokenizer


BEGINNINGS = {"none": [], "one": ["<s>"], "two": ["[gMASK]", "<sop>"]}


@pytest.mark.parametrize("after", ["", TOKENIZER.eos_token])
@pytest.mark.parametrize("names", BEGINNINGS.values(), ids=BEGINNINGS)
def test_documents_begin_as_the_tokenizer_begins_a_text(names, after):
    tokenizer, end = beginning_with(names, after), TOKENIZER.eos_token_id
    assert beginning_of(tokenizer) == tokenizer.convert_tokens_to_ids(names)
    for text in ("def f(x):", "a", "", "\n  \n"):
        read = tokenizer(text).input_ids  # as prompts are
        expected = read if after else [*read, end]
        assert encode_texts([text], tokenizer)[0].tolist() == expected


WRITTEN = {
    "beginning": "{first}a text",
    "end": "a text{end}",
    "both": "{first}a text{end}",
    "end and a line's end": "{first}user{end}\n<|x|>answer{end}\n",
}


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("names", BEGINNINGS.values(), ids=BEGINNINGS)
def test_what_a_chat_template_wrote_is_not_written_again(names, form):
    tokenizer = beginning_with(names)
    text = WRITTEN[form].format(first="".join(names), end=TOKENIZER.eos_token)
    (ids,) = encode_texts([text], tokenizer)
    own, first = tokenizer(text, add_special_tokens=False).input_ids, beginning_of(tokenizer)
    assert ids[: len(first)].tolist() == first
    assert ids.tolist().count(TOKENIZER.eos_token_id) == max(text.count(TOKENIZER.eos_token), 1)
    assert len(ids) == len(own) + (form == "end") * len(first) + (form == "beginning")
    ends_early = f"{TOKENIZER.eos_token} and more"
    assert encode_texts([ends_early], tokenizer)[0][-1] == TOKENIZER.eos_token_id


def test_a_document_longer_than_the_context_is_no_reason_to_warn(caplog):
    with caplog.at_level(logging.WARNING, logger="transformers"):
        (ids,) = encode_texts(["x = 1\n" * 2000], TOKENIZER)
    assert len(ids) > TOKENIZER.model_max_length
    assert not caplog.records


shapes = st.tuples(st.integers(1, 3), st.integers(1, 7))


def documents_of(*lengths):
    """Documents whose tokens are all different."""
    ends = np.cumsum(lengths)
    return [np.arange(end - n, end) for end, n in zip(ends, lengths, strict=True)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 99), shapes)
def test_an_epoch_is_every_document_once_cut_end_to_end(lengths, seed, shape):
    batch_size, length = shape
    documents, total = documents_of(*lengths), sum(lengths)
    if total < batch_size * length + 1:
        return
    count = (total - 1) // (batch_size * length)
    *epoch, after = PackedStream(documents, seed=seed).batches([shape] * (count + 1))
    seen = []
    for rows in epoch:
        assert rows.shape == (batch_size, length + 1)
        assert (rows[1:, 0] == rows[:-1, -1]).all()  # a row starts with the last one's last label
        seen += rows[:, :-1].flatten().tolist()
    assert total - len(seen) <= batch_size * length
    assert len(set(seen)) == len(seen)  # no token twice
    starts = {ids[0]: ids.tolist() for ids in documents if len(ids)}
    assert int(after[0, 0]) in starts  # the next epoch begins with a document
    place = 0
    while place < len(seen):  # whole documents, in some order
        document = starts.pop(seen[place])
        assert seen[place : place + len(document)] == document[: len(seen) - place]
        place += len(document)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(0, 99),
    st.tuples(st.integers(1, 3), st.integers(3, 7)),
)
def test_every_row_begins_as_a_text_and_no_text_begins_twice(lengths, count, seed, shape):
    first = list(range(1000, 1000 + count))
    texts = documents_of(*lengths)
    stream = PackedStream([np.array([*first, *ids]) for ids in texts], seed=seed, beginning=first)
    used = shape[0] * (shape[1] + 1 - count)
    if not sum(lengths) or stream.num_tokens < used + count:
        return
    steps = (stream.num_tokens - count) // used
    rows = torch.cat([*stream.batches([shape] * steps)]).tolist()
    after = {int(ids[i]): int(ids[i + 1]) for ids in texts for i in range(len(ids) - 1)}
    learned = []
    for row in rows:
        assert row[:count] == first
        whole = "".join(map(chr, row))
        assert "".join(map(chr, first * 2)) not in whole or 0 in lengths
        learned += [token for token in row[count:] if token < 1000]
        for one, two in zip(row[count:], row[count + 1 :], strict=False):
            assert two == after.get(one, first[0]) or one in first
    missed = sum(lengths) - len(set(learned))
    assert missed <= used + count  # what an epoch leaves over, and no token inside of it
    assert len(learned) - len(set(learned)) <= count * len(rows)


def test_documents_without_the_beginning_get_it_and_too_short_rows_are_refused():
    plain, first = documents_of(5, 6), [1000, 1001]
    given_it = [np.array([*first, *ids]) for ids in plain]
    both = [
        next(PackedStream(each, seed=0, beginning=first).batches([(2, 4)]))
        for each in (plain, given_it)
    ]
    assert both[0].equal(both[1])
    with pytest.raises(ValueError, match=r"tokens of a row.*got 1; a text begins with 2 ids"):
        next(PackedStream(plain, seed=0, beginning=first).batches([(1, 1)]))


def test_pieces_of_a_text_that_are_held_out_begin_as_a_text():
    rest, held_out = hold_out([np.array([1000, *range(700)])], 2, [1000])
    assert len(held_out) == 2
    for ids in [*rest, *held_out]:
        assert ids[0] == 1000
        assert (ids[1:] < 1000).all()
    assert sorted(np.concatenate([ids[1:] for ids in [*rest, *held_out]])) == list(range(700))


def test_epochs_come_in_other_orders_that_the_seed_alone_decides():
    documents = documents_of(*[5] * 20)

    def epochs(seed):
        stream = PackedStream(documents, seed=seed)
        return [tuple(rows[0].tolist()) for rows in stream.batches([(1, 98)] * 4)]

    first = epochs(0)
    assert len(set(first)) == 4
    assert epochs(0) == first
    assert not set(epochs(1)) & set(first)


@given(
    st.lists(st.integers(1, 9), min_size=4, max_size=8),
    st.integers(0, 99),
    st.lists(shapes, max_size=12),
    st.integers(0, 12),
)
def test_a_stream_goes_on_from_a_place_as_if_it_had_never_stopped(lengths, seed, shapes, skip):
    stream = PackedStream(documents_of(21, *lengths), seed=seed)
    whole, rest = list(stream.batches(shapes)), list(stream.batches(shapes, skip=skip))
    assert len(rest) == max(0, len(shapes) - skip)
    assert all(a.equal(b) for a, b in zip(whole[skip:], rest, strict=True))


def test_text_that_cannot_be_trained_on_is_refused():
    stream = PackedStream(documents_of(5, 6), seed=0)
    with pytest.raises(ValueError, match=r"takes 13 tokens and the text has 11; give more text"):
        next(stream.batches([(3, 4)]))
    for nothing in ([], [np.array([], dtype=np.uint16)]):
        with pytest.raises(ValueError, match="no text to train on"):
            PackedStream(nothing, seed=0)
    for other in (np.zeros(3), torch.tensor([1, 2])):
        with pytest.raises(TypeError, match=r"NumPy arrays of integer ids, got .*ids.numpy\(\)"):
            PackedStream([other], seed=0)
    with pytest.raises(TypeError, match="texts must be a list of texts, got one text"):
        encode_texts("a", TOKENIZER)
