"""`specdec evaluate` prints what `evaluate` returns, and goes on with what was interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.lab.cli import main
from specdec.lab.cli.evaluate import _first_of_each
from specdec.lab.evaluation import Evaluation, Prompt

COMMAND = ["evaluate", "--drafter", "lookup", "--max-new-tokens", "4", "--warmup", "0"]


def spec_bench(path, count: int):
    """A file of Spec-Bench's form: categories in a row, some prompts with two turns."""
    categories = ["writing", "math", "translation", "qa", "rag", "summarization"]
    with path.open("w") as file:
        for i in range(count):
            turns = [f"def f{i}(a, b):", "return"][: 1 + (i % 6 == 0)]
            category = categories[i * len(categories) // count]
            line = {"question_id": i, "category": category, "turns": turns}
            file.write(json.dumps(line) + "\n")
    return path


def test_it_prints_a_table_by_category_and_writes_the_run(tmp_path, capsys):
    prompts, output = spec_bench(tmp_path / "p.jsonl", 12), tmp_path / "run.jsonl"
    arguments = [*COMMAND, "--prompts", str(prompts), "--output", str(output), "--batch-size", "2"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    for word in ("writing", "summarization", "all", "conditional rate"):
        assert word in shown
    evaluation = Evaluation.load(output)
    assert str(evaluation) in shown
    assert len(evaluation.rows) == 12 + 2
    assert main([*arguments, "--format", "json"]) == 0  # nothing left to do
    saved = json.loads(capsys.readouterr().out)
    length = saved["estimates"]["acceptance_length"]
    assert length["value"] == evaluation.stats.acceptance_length
    assert saved["run"]["prompts"]["count"] == 12


@pytest.mark.parametrize("drafter", ["lookup", "zoo:eagle3"])
def test_it_measures_trees(drafter, tmp_path, capsys):
    prompts, output = spec_bench(tmp_path / "p.jsonl", 6), tmp_path / "run.jsonl"
    options = ["--prompts", str(prompts), "--output", str(output), "--tree", "6x3"]
    assert main([*COMMAND, *options, "--drafter", drafter]) == 0
    capsys.readouterr()
    steps = [step for row in Evaluation.load(output).rows for step in row.steps]
    assert {len(step.draft_tokens) for step in steps if step.draft_tokens} == {6}
    assert {step.depth for step in steps if step.draft_tokens} <= {1, 2, 3}


@pytest.mark.parametrize("form", ["markdown", "latex"])
def test_it_prints_papers_tables(form, tmp_path, capsys):
    prompts = spec_bench(tmp_path / "p.jsonl", 6)
    arguments = ["--prompts", str(prompts), "--limit", "6", "--format", form]
    assert main([*COMMAND, *arguments]) == 0
    assert {"markdown": "|---|", "latex": r"\toprule"}[form] in capsys.readouterr().out


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=30), st.integers(1, 40))
def test_a_limit_is_met_and_spread_evenly_over_categories(categories, limit):
    prompts = [Prompt(str(i), ("x",), category) for i, category in enumerate(categories)]
    chosen = _first_of_each(prompts, limit)
    assert len(chosen) == min(limit, len(prompts))
    assert chosen == [prompt for prompt in prompts if prompt in chosen]  # in their order
    taken, there = (Counter(p.category for p in some) for some in (chosen, prompts))
    for name, count in taken.items():
        assert [p for p in prompts if p.category == name][:count] == [
            p for p in chosen if p.category == name
        ]
    for name, count in there.items():  # whoever has one less than another has no more to give
        assert taken[name] == count or taken[name] >= max(taken.values()) - 1


def test_a_limit_is_what_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    prompts = spec_bench(tmp_path / "p.jsonl", 24)
    assert main([*COMMAND, "--prompts", str(prompts), "--limit", "7"]) == 0
    captured = capsys.readouterr()
    assert "measuring 7 of 24 prompts, --limit 7\n" in captured.err
    every = [line.split() for line in captured.out.splitlines() if line.startswith("all ")]
    assert every[0][1] == "7"
    assert "[" in every[0][3]  # an interval, from six prompts on
    assert max(map(len, captured.out.splitlines())) <= 80


@pytest.mark.slow
def test_480_prompts_run_end_to_end_through_an_interruption(tmp_path):
    prompts, output = spec_bench(tmp_path / "p.jsonl", 480), tmp_path / "run.jsonl"
    command = [sys.executable, "-m", "specdec", *COMMAND, "--prompts", str(prompts)]
    command += ["--output", str(output)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen(command, env=os.environ, **options)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if output.exists() and len(output.read_bytes().splitlines()) > 60:
            break
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = len(output.read_bytes().splitlines())
    assert 60 < before < 480
    second = subprocess.run(command, env=os.environ, check=True, **options)
    assert "480/480" in second.stderr  # the bar goes on where the first run was
    assert "all" in second.stdout
    assert "480" in second.stdout
    rows = Evaluation.load(output).rows
    turns = [(row.prompt, row.turn) for row in rows]
    assert len(turns) == len(set(turns)) == 480 + 80


def test_what_the_template_does_not_read_is_refused(tmp_path, capsys):
    prompts = ["--prompts", str(spec_bench(tmp_path / "p.jsonl", 6))]
    thinking = ["--chat-template-kwargs", '{"enable_thinking": false}']
    assert main([*COMMAND, *prompts, *thinking]) == 2
    assert "'enable_thinking', which the tokenizer's chat template" in capsys.readouterr().err
