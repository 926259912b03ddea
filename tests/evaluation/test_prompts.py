"""Prompt files of the field are read by their form, and turns go through the chat template."""

import json

import pytest
import torch

from specdec import zoo
from specdec.evaluation import Prompt, own_prompts, read_prompts
from specdec.evaluation.prompts import as_prompts, encode

TOKENIZER = zoo.load_tokenizer()
FORMS = {
    "Spec-Bench": (
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        Prompt("81", ("Write.", "Again."), "writing"),
    ),
    "HumanEval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass\n"},
        Prompt("HumanEval/0", ("def f():\n",), "humaneval"),
    ),
    "GSM8K": (
        {"question": "How many?", "answer": "#### 18"},
        Prompt("1", ("How many?",), "gsm8k"),
    ),
    "text": ({"text": "Once"}, Prompt("1", ("Once",))),
    "prompt": ({"id": "a", "prompt": "Once", "category": "c"}, Prompt("a", ("Once",), "c")),
}


NO_FORM = (b'{"turns": "one text"}', b'{"turns": []}', b'{"prompt": ""}', b'{"prompt": 3}', b"[1]")


@pytest.mark.parametrize("form", FORMS)
def test_a_line_is_read_by_its_form(form, tmp_path):
    line, expected = FORMS[form]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(line) + "\n\n")
    assert read_prompts(path) == [expected]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2 is no JSON"),
        (b'"\xff"', "line 2 is no JSON in UTF-8"),
        (b"[" * 99999, "line 2 is no JSON"),
        *((line, "line 2 must be an object") for line in NO_FORM),
        (b'{"question_id": 1, "turns": ["b"]}', "2 prompts have the id '1'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_line_of_no_form_is_named(line, message, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"question_id": 1, "turns": ["a"]}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_a_file_that_is_not_there_or_holds_nothing_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="there are no prompts"):
        read_prompts(tmp_path / "empty.jsonl")


def test_line_separators_inside_a_text_end_no_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False), encoding="utf-8")
    assert read_prompts(path)[0].turns == ("a\u2028b\x85c",)


def test_the_own_set_has_four_categories_and_turns():
    prompts = own_prompts()
    assert len({prompt.id for prompt in prompts}) == 16
    assert {prompt.category for prompt in prompts} == {"code", "prose", "reasoning", "dialogue"}
    assert {len(prompt.turns) for prompt in prompts} == {1, 2}


def test_without_a_chat_template_turns_and_replies_are_one_text():
    prompt = Prompt("0", ("first", "second"))
    assert TOKENIZER.chat_template is None
    assert encode(prompt, [], TOKENIZER) == TOKENIZER("first").input_ids
    second = encode(prompt, [" reply"], TOKENIZER)
    assert second == TOKENIZER("first reply\n\nsecond").input_ids


def test_a_chat_template_gets_the_messages_and_adds_the_special_tokens_itself():
    tokenizer = zoo.load_tokenizer()
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    prompt = Prompt("0", ("first", "second"))
    text = "<|endoftext|><user>first<assistant>reply<user>second<assistant>"
    expected = tokenizer(text, add_special_tokens=False).input_ids
    assert encode(prompt, ["reply"], tokenizer) == expected
    assert expected.count(tokenizer.bos_token_id) == 1


def test_prompts_come_as_texts_ids_records_or_a_padded_tensor():
    ids, mask = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    expected = [Prompt("0", ((5, 6),)), Prompt("1", ((7, 8, 9),))]
    assert as_prompts(ids, mask) == expected
    assert as_prompts([[5, 6], torch.tensor([7, 8, 9])]) == expected
    assert as_prompts(["a", Prompt("x", ("b",))]) == [Prompt("0", ("a",)), Prompt("x", ("b",))]
    assert encode(expected[0], [], None) == [5, 6]
