"""The chat template and its variables decide what is measured, so a run says them."""

import re

import pytest

from specdec import PromptLookupDrafter, SpeculativeGenerator, zoo
from specdec.lab.evaluation import Evaluation, Prompt, evaluate
from specdec.lab.evaluation.prompts import encode

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)
GENERATOR = SpeculativeGenerator(zoo.load_target(), PromptLookupDrafter(3))
PROMPTS = [Prompt(f"p{i}", (f"def f{i}(a, b):",), "ab"[i % 2]) for i in range(6)]
OFF = {"enable_thinking": False}


def chatting(template=TEMPLATE):
    tokenizer = zoo.load_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def run(tokenizer, **options) -> Evaluation:
    return evaluate(GENERATOR, PROMPTS, tokenizer=tokenizer, max_new_tokens=4, **options)


def test_variables_reach_the_template_and_the_file(tmp_path):
    tokenizer, path = chatting(), tmp_path / "run.jsonl"
    without = tokenizer("<user>def f0(a, b):<assistant>", add_special_tokens=False).input_ids
    assert encode(PROMPTS[0], [], tokenizer) == without
    text = "<user>def f0(a, b):<assistant><think></think>"
    expected = tokenizer(text, add_special_tokens=False).input_ids
    assert encode(PROMPTS[0], [], tokenizer, OFF) == expected
    rows = run(tokenizer, chat_template_kwargs=OFF, output=path).rows
    assert rows[0].num_prompt_tokens == len(expected)
    about = Evaluation.load(path).about["run"]
    assert about["plan"]["chat_template_kwargs"] == OFF
    assert re.fullmatch("[0-9a-f]{16}", about["tokenizer"]["chat_template"])
    assert about["tokenizer"]["name"] == "target"


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_a_variable_that_no_template_reads_is_refused(template, tmp_path):
    path = tmp_path / "run.jsonl"
    with pytest.raises(ValueError, match="'enable_thinking', which the tokenizer's chat template"):
        run(chatting(template), chat_template_kwargs=OFF, output=path)
    assert not path.exists()


def test_another_template_is_named_where_runs_are_compared(tmp_path):
    path = tmp_path / "run.jsonl"
    one, same = run(chatting(), output=path), run(chatting())
    assert one.against(same).notes == ("The runs differ in nothing.",)
    other = run(chatting(TEMPLATE + "\n"), chat_template_kwargs=OFF)
    table = other.against(one)
    assert table.header == ["category", "here", "there"]
    assert [row[0] for row in table.rows] == ["a", "b", "all"]
    both = [str(e.estimates["acceptance_length"]) for e in (other, one)]
    assert table.rows[-1][1:] == both
    digest = "'[0-9a-f]{16}'"
    assert re.fullmatch(
        r"The runs differ in plan\.chat_template_kwargs\.enable_thinking \(None there, False "
        rf"here\), tokenizer\.chat_template \({digest} there, {digest} here\)\.",
        table.notes[0],
    )
    with pytest.raises(ValueError, match=r"differ in tokenizer\.chat_template"):
        run(chatting(TEMPLATE + "\n"), output=path)
