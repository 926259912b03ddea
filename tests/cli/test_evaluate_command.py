"""`specdec evaluate` prints what `evaluate` returns, and goes on with what was interrupted."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from specdec.cli import main
from specdec.evaluation import Evaluation

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


@pytest.mark.parametrize("form", ["markdown", "latex"])
def test_it_prints_papers_tables(form, tmp_path, capsys):
    prompts = spec_bench(tmp_path / "p.jsonl", 6)
    arguments = ["--prompts", str(prompts), "--limit", "6", "--format", form]
    assert main([*COMMAND, *arguments]) == 0
    assert {"markdown": "|---|", "latex": r"\toprule"}[form] in capsys.readouterr().out


def test_a_limit_takes_as_many_of_each_category(tmp_path, capsys):
    prompts = spec_bench(tmp_path / "p.jsonl", 24)
    output = tmp_path / "run.jsonl"
    arguments = ["--prompts", str(prompts), "--limit", "12", "--output", str(output)]
    assert main([*COMMAND, *arguments]) == 0
    counts = {
        n: len({r.prompt for r in c.rows}) for n, c in Evaluation.load(output).categories.items()
    }
    assert set(counts.values()) == {2}
    assert len(counts) == 6
    capsys.readouterr()
    assert main([*COMMAND, "--prompts", str(prompts), "--limit", "15"]) == 0  # 2 of each of 6
    assert "measuring 12 of 24 prompts, --limit 15\n" in capsys.readouterr().err


def test_mistakes_are_one_line(tmp_path, capsys):
    assert main([*COMMAND, "--prompts", str(tmp_path / "none.jsonl")]) == 2
    assert main([*COMMAND, "--limit", "0"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "no prompts at" in errors[0]
    assert "--limit must be at least 1" in errors[1]


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
