"""Prompt files of the field are read by their form, and turns go through the chat template."""

import json

import pytest
import torch

from specdec import zoo
from specdec.lab.evaluation import Prompt, own_prompts, read_prompts
from specdec.lab.evaluation.prompts import as_prompts, encode

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
    "SPEED-Bench": (
        {
            "question_id": "7c1f",
            "category": "multilingual",
            "sub_category": "",
            "turns": ["Translate.", "Again."],
            "source": "x",
            "src_id": "y",
            "difficulty": "",
            "multiturn": True,
        },
        Prompt("7c1f", ("Translate.", "Again."), "multilingual"),
    ),
    "SPEED-Bench of NeMo": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
        Prompt("1", ("a", "b")),
    ),
    "MT-bench on the hub": (
        {"prompt": ["Write.", "Again."], "prompt_id": 81, "category": "writing", "reference": []},
        Prompt("81", ("Write.", "Again."), "writing"),
    ),
    "MATH-500": (
        {"problem": "1 + 1?", "solution": "...", "answer": "2", "unique_id": "test/a/1.json"},
        Prompt("test/a/1.json", ("1 + 1?",), "math"),
    ),
    "AIME": (
        {"problem_idx": 3, "problem": "1 + 1?", "answer": 2},
        Prompt("1", ("1 + 1?",), "math"),
    ),
    "Alpaca": (
        {"instruction": "Add.", "input": "1 2", "output": "3", "text": "Below is ..."},
        Prompt("1", ("Add.\n\nInput:\n1 2",), "alpaca"),
    ),
    "Alpaca without input": (
        {"instruction": "Sing.", "input": "", "output": "la", "text": "Below is ..."},
        Prompt("1", ("Sing.",), "alpaca"),
    ),
    "MBPP": (
        {"task_id": 2, "prompt": "Add.", "code": "x", "test_list": ["assert x"]},
        Prompt("2", ("Add.",), "mbpp"),
    ),
    "MBPP in full": (
        {"task_id": 2, "text": "Add.", "code": "x", "test_list": ["assert x"]},
        Prompt("2", ("Add.",), "mbpp"),
    ),
    "LiveCodeBench": (
        {
            "question_title": "A",
            "question_content": "Sort.",
            "question_id": "1_A",
            "starter_code": "",
        },
        Prompt("1_A", ("Sort.",), "livecodebench"),
    ),
    "SWE-bench": (
        {"repo": "a/b", "instance_id": "a__b-1", "problem_statement": "It fails."},
        Prompt("a__b-1", ("It fails.",), "swe-bench"),
    ),
    "Arena-Hard": (
        {"uid": "f0", "category": "hard_prompt", "subcategory": "coding", "prompt": "Write."},
        Prompt("f0", ("Write.",), "hard_prompt"),
    ),
}


NO_FORM = (
    b'{"turns": "one text"}',
    b'{"turns": []}',
    b'{"prompt": ""}',
    b'{"prompt": 3}',
    b'{"text": ["a"]}',
    b'{"messages": [{"role": "system", "content": "a"}]}',
    b'{"messages": ["a"]}',
    b"[1]",
)


def read(line, folder, **options):
    """The prompts of a file of one line."""
    text = json.dumps(line, ensure_ascii=False)
    (folder / "prompts.jsonl").write_text(f"{text}\n\n", encoding="utf-8")
    return read_prompts(folder / "prompts.jsonl", **options)


@pytest.mark.parametrize("form", FORMS)
def test_a_line_is_read_by_its_form(form, tmp_path):
    line, expected = FORMS[form]
    assert read(line, tmp_path) == [expected]


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


@pytest.mark.parametrize("suffix", ["json", "parquet"])
@pytest.mark.parametrize("form", ["SPEED-Bench", "MT-bench on the hub", "GSM8K", "Alpaca"])
def test_a_list_and_a_table_hold_what_lines_hold(form, suffix, tmp_path):
    line, expected = FORMS[form]
    path = tmp_path / f"test.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps([line]))
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist([line]), path)
    assert read_prompts(path) == [expected]


def test_a_folder_is_read_in_the_order_of_its_files_which_number_on(tmp_path):
    for name, text in (("b/test.jsonl", "third"), ("a.jsonl", "first"), ("a2.jsonl", "second")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": text}))
    (tmp_path / "dataset_infos.json").write_text("{}")
    expected = [Prompt("1", ("first",)), Prompt("2", ("second",)), Prompt("3", ("third",))]
    assert read_prompts(tmp_path) == expected
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds no \.jsonl or \.parquet file"):
        read_prompts(tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"{", "is no json file"),
        ("a.json", b'{"text": "a"}', "must hold a list of objects"),
        ("a.json", b"[3]", "line 1 must be an object"),
        ("a.parquet", b"PAR1", "is no parquet file"),
    ],
)
def test_a_damaged_file_is_named(name, content, message, tmp_path):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}.*{message}"):
        read_prompts(tmp_path / name)


def test_prompts_that_speed_bench_has_not_fetched_yet_are_refused(tmp_path):
    line = dict(FORMS["SPEED-Bench"][0])
    line["turns"] = [
        "Translate.",
        "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\n{article}",
    ]
    with pytest.raises(ValueError, match=r"line 1 has a placeholder.*prepare_data\.py"):
        read(line, tmp_path)


WORDED = {
    "GSM8K": "How many?\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "MATH-500": "1 + 1?\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "HumanEval": "Write a solution to the following problem and make sure that it passes the tests:"
    "\n```python\ndef f():\n\n```",
    "SWE-bench": "Problem Statement:\nIt fails.\nPlease fix the issue described above.",
    "MBPP": "Add.",
    "Alpaca": "Add.\n\nInput:\n1 2",
    "Arena-Hard": "Write.",
}


@pytest.mark.parametrize("form", WORDED)
def test_prompts_are_worded_as_in_the_benchmarks_of_dflash(form, tmp_path):
    (prompt,) = read(FORMS[form][0], tmp_path, worded=True)
    assert prompt.turns == (WORDED[form],)


@pytest.mark.parametrize(
    ("starter", "tail"),
    [
        ("", "Write your code in the following format:\n```python\n# YOUR CODE HERE\n```"),
        ("class {}:", "Use the following code structure:\n```python\nclass {}:\n```"),
    ],
)
def test_livecodebench_is_worded_with_its_starter_code(starter, tail, tmp_path):
    line = FORMS["LiveCodeBench"][0] | {"starter_code": starter}
    (text,) = read(line, tmp_path, worded=True)[0].turns
    assert text.startswith("You are an expert Python programmer. ")
    assert f"\n\n### Question:\nSort.\n\n### Format: {tail}\n\n### Answer: (use" in text


def test_a_file_that_is_not_there_or_holds_nothing_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="there are no prompts"):
        read_prompts(tmp_path / "empty.jsonl")


def test_line_separators_inside_a_text_end_no_line(tmp_path):
    assert read({"text": "a\u2028b\x85c"}, tmp_path)[0].turns == ("a\u2028b\x85c",)


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
