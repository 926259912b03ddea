"""The ablation script: a row per cell; it goes on where it stopped; two processes give the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GRID = [
    *("--drafters", "lookup", "--num-draft-tokens", "2", "--temperatures", "0", "1"),
    *("--samplers", "block", "rejection", "--limit", "5", "--max-new-tokens", "6"),
    *("--batch-size", "2"),
]
SCRIPT = str(ROOT / "examples" / "ablate.py")


def run(command: list[str], output: Path, *arguments: str) -> list[dict]:
    """The rows after a run."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [*command, SCRIPT, *GRID, *arguments, "--output", str(output)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in output.read_text().splitlines()]


def without_times(rows: list[dict]) -> list[dict]:
    """What must not depend on the machine or on the number of processes."""
    return [
        {n: v for n, v in row.items() if n not in ("tokens_per_second", "about")} for row in rows
    ]


@pytest.fixture(scope="module", name="rows")
def _rows(tmp_path_factory):
    return run([sys.executable], tmp_path_factory.mktemp("one") / "grid.jsonl")


def test_there_is_a_row_per_cell_with_intervals_and_provenance(rows):
    cells = [tuple(row["cell"].values()) for row in rows]
    assert cells == [
        ("lookup", 2, temperature, sampler)
        for temperature in (0.0, 1.0)
        for sampler in ("block", "rejection")
    ]
    for row in rows:
        length = 1 + row["accepted"] / row["steps"]
        assert row["acceptance_length"]["low"] is None  # five prompts
        assert row["acceptance_length"]["value"] == pytest.approx(length)
        assert row["about"]["versions"]["torch"]
        assert row["steps"] <= row["emitted"] <= 5 * 6
    assert rows[0]["accepted"] == rows[1]["accepted"]  # greedy: both rules are one


def test_an_interrupted_grid_goes_on_with_the_cells_that_are_missing(rows, tmp_path):
    path = tmp_path / "grid.jsonl"
    lines = [json.dumps(row) for row in rows]
    path.write_text(lines[0] + "\n" + lines[2] + "\n" + lines[1][:30])  # killed while writing
    found = run_broken(path)
    assert [row["cell"] for row in found[:2]] == [rows[0]["cell"], rows[2]["cell"]]
    key = str
    assert sorted(map(key, without_times(found))) == sorted(map(key, without_times(rows)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row["about"]["run"]["plan"].update(seed=9), r"plan.seed (9 there, 0 here)"),
        (lambda row: row["about"]["run"]["prompts"].update(count=9), "prompts.count (9 there, 5 h"),
        (lambda row: row["about"]["run"]["drafter"].update(max_ngram=9), "drafter.max_ngram"),
        (lambda row: row.pop("cell"), "line 1 is no row of a grid"),
    ],
)
def test_a_file_of_another_grid_is_refused_and_left_alone(rows, change, message, tmp_path):
    path, row = tmp_path / "grid.jsonl", json.loads(json.dumps(rows[0]))
    change(row)
    path.write_text(json.dumps(row) + "\n")
    before = path.read_bytes()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, SCRIPT, *GRID, "--output", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]
    assert path.read_bytes() == before


def run_broken(path: Path) -> list[dict]:
    """A run after an interruption; the line that was cut off is still there and is none."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, SCRIPT, *GRID, "--output", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "4 cells, 2 finished" in done.stderr
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            assert len(line) == 30
    return rows


@pytest.mark.slow
def test_two_processes_give_the_rows_of_one(rows, tmp_path):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    launch += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    launch += ["--dynamo_backend", "no", "--main_process_port", "0"]
    found = run(launch, tmp_path / "grid.jsonl")
    assert without_times(found) == without_times(rows)
