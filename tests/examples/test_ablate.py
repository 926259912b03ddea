"""The ablation script: a row per cell; it goes on where it stopped; two processes give the same."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from training_runs import on_a_cpu

ROOT = Path(__file__).parents[2]
GRID = [
    *("--drafters", "lookup", "zoo:model", "--num-draft-tokens", "2", "--temperatures", "0", "1"),
    *("--samplers", "block", "rejection", "--limit", "5", "--max-new-tokens", "6"),
    *("--batch-size", "2"),
]
SCRIPT = str(ROOT / "examples" / "ablate.py")


def environment() -> dict[str, str]:
    """Of a process on a CPU."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def script(path: str):
    """A script as a module."""
    spec = spec_from_file_location(Path(path).stem, ROOT / path)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def called(*arguments: str) -> int:
    """The exit status of the grid in this process, which starts sooner than another one."""
    with on_a_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [SCRIPT, *arguments])
        return script("examples/ablate.py").main()


def run(command: list[str], output: Path, *arguments: str) -> list[dict]:
    """The rows after a run."""
    command = [*command, SCRIPT, *GRID, *arguments, "--output", str(output)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, cwd=ROOT)
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
        ("lookup", 2, 0.0, "block"),  # samplers that are one rule are one cell
        ("lookup", 2, 1.0, "block"),
        ("zoo:model", 2, 0.0, "block"),
        ("zoo:model", 2, 1.0, "block"),
        ("zoo:model", 2, 1.0, "rejection"),
    ]
    for row in rows:
        length = 1 + row["accepted"] / row["steps"]
        assert row["acceptance_length"]["low"] is None  # five prompts
        assert row["acceptance_length"]["value"] == pytest.approx(length)
        assert row["about"]["versions"]["torch"]
        assert row["steps"] <= row["emitted"] <= 5 * 6


@pytest.mark.parametrize(
    ("sampler", "temperature", "of"), [("rejection", 0, 0), ("coupling", 0, 0), ("rejection", 1, 1)]
)
def test_samplers_that_are_one_rule_give_equal_rows(sampler, temperature, of, rows, tmp_path):
    """Which is why they are run once."""
    path = tmp_path / "grid.jsonl"
    cell = ["--drafters", "lookup", "--temperatures", str(temperature), "--samplers", sampler]
    assert called(*GRID, *cell, "--output", str(path)) == 0
    (found,) = without_times([json.loads(path.read_text())])
    assert found["cell"] == {**rows[of]["cell"], "sampler": sampler}
    (expected,) = without_times([rows[of]])
    assert {**found, "cell": 0} == {**expected, "cell": 0}


DRAFTERS = """
import torch
from specdec import PromptLookupDrafter


class Own(PromptLookupDrafter):
    def __init__(self, target, num_draft_tokens):
        super().__init__(num_draft_tokens, max_ngram=target.config.num_hidden_layers)


def of_another_k(target, num_draft_tokens):
    return Own(target, num_draft_tokens + 1)


def nothing(target, num_draft_tokens):
    pass


number = 3
"""


@pytest.fixture
def _own_drafters(tmp_path, monkeypatch):
    """A working folder that has a module with drafters."""
    (tmp_path / "mine.py").write_text(DRAFTERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("mine", None)


@pytest.mark.usefixtures("_own_drafters")
def test_a_drafter_of_ones_own_is_in_the_grid():
    arguments = [*GRID, "--drafters", "mine:Own", "model", "--temperatures", "0"]
    assert called(*arguments, "--output", "grid.jsonl") == 0
    found = [json.loads(line) for line in Path("grid.jsonl").read_text().splitlines()]
    assert [row["cell"]["drafter"] for row in found] == ["mine:Own", "zoo:model"]
    assert found[0]["about"]["run"]["drafter"]["class"] == "Own"
    assert found[0]["about"]["run"]["drafter"]["max_ngram"] == 16


@pytest.mark.usefixtures("_own_drafters")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine:missing", "error: --drafters mine:missing: AttributeError: "),
        ("nobodys:Own", "error: --drafters nobodys:Own: ModuleNotFoundError: "),
        ("mine:number", "error: --drafters mine:number must be a function or class, got 3"),
        ("mine:nothing", "must make a Drafter of K = 2 from (target, 2), got NoneType"),
        ("mine:of_another_k", "must make a Drafter of K = 2 from (target, 2), got Own of K = 3"),
        ("zoo:none", "error: the zoo has no drafter 'none'"),
        ("./no/such", "error: cannot load './no/such'"),
    ],
)
def test_a_drafter_that_cannot_be_made_is_one_line(name, message, capsys):
    assert called(*GRID, "--drafters", name, "--output", "grid.jsonl") == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "finished" not in line]
    assert len(lines) == 1
    assert message in lines[0]
    assert not Path("grid.jsonl").exists()


def test_an_interrupt_is_one_line_that_says_how_to_go_on(tmp_path):
    command = [sys.executable, SCRIPT, *GRID, "--max-new-tokens", "200"]
    command += ["--num-draft-tokens", *"123456789", "--output", "grid.jsonl"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment(), cwd=tmp_path, **options)
    deadline = time.monotonic() + 120
    while not (tmp_path / "grid.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == (
        "interrupted: grid.jsonl holds the cells that are finished; the same command goes on with "
        "the others"
    )
    for line in (tmp_path / "grid.jsonl").read_text().splitlines():
        assert json.loads(line)["cell"]


def test_help_has_all_defaults(capsys):
    with pytest.raises(SystemExit):
        called("--help")
    shown = " ".join(capsys.readouterr().out.split("options:")[1].split())
    assert "(default: zoo:model zoo:eagle3 zoo:mask-token zoo:mtp lookup)" in shown
    for option in re.split(r" (?=--[a-z-]+ [A-Z{])", shown)[2:]:
        assert ("(default: " in option) is not option.startswith("--output"), option
    assert "None" not in shown


def printed(path: Path, capsys) -> list[list[str]]:
    """The cells of the table of `docs/grid.py`."""
    script("docs/grid.py").main(path, "acceptance_length")
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_leaves_out_lines_that_were_cut_off(rows, tmp_path, capsys):
    lines = [json.dumps(row) for row in rows]
    cut = tmp_path / "grid.jsonl"
    cut.write_text("\n".join([lines[0], lines[1][:30], *lines[2:], lines[0][:40]]))
    found = printed(cut, capsys)
    assert [row[:3] for row in found] == [
        ["lookup", "0", "block"],
        ["model", "0", "block"],
        ["model", "1", "block"],
        ["model", "1", "rejection"],
    ]
    assert [row[3] for row in found] == [
        f"{rows[i]['acceptance_length']['value']:.2f}" for i in (0, 2, 3, 4)
    ]


@pytest.mark.parametrize(
    ("intervals", "bold"),
    [
        ({"a": (1.0, 2.0), "b": (2.1, 3.0)}, {"b"}),
        ({"a": (1.0, 2.2), "b": (2.1, 3.0)}, set()),  # they overlap
        ({"a": (1.0, 2.0), "b": (2.1, 2.3), "c": (2.25, 3.0)}, set()),
        ({"a": (1.0, 2.0), "b": (2.1, 2.3), "c": (2.4, 3.0)}, {"c"}),
        ({"a": (None, None), "b": (2.1, 3.0)}, set()),  # nothing is known of one
        ({"a": (1.0, 2.0)}, set()),  # best of nothing
    ],
)
def test_a_best_cell_is_bold_where_its_interval_is_apart(intervals, bold, tmp_path, capsys):
    path = tmp_path / "grid.jsonl"
    with path.open("w") as file:
        for name, (low, high) in intervals.items():
            value = 1.5 if low is None else (low + high) / 2
            for k, temperature in ((2, 0.0), (4, 0.0), (2, 1.0)):
                cell = {"drafter": name, "num_draft_tokens": k, "temperature": temperature}
                length = {"value": value, "low": low, "high": high, "level": 0.95}
                row = {"cell": {**cell, "sampler": "block"}, "acceptance_length": length}
                file.write(json.dumps(row) + "\n")
    for name, temperature, _, *cells in printed(path, capsys):
        shown = [cell for cell in cells if cell]
        assert len(shown) == (2 if temperature == "0" else 1)
        for cell in shown:
            assert (cell.startswith("**") and cell.endswith("**")) is (name in bold)


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
def test_a_file_of_another_grid_is_refused_and_left_alone(rows, change, message, tmp_path, capsys):
    path, row = tmp_path / "grid.jsonl", json.loads(json.dumps(rows[0]))
    change(row)
    path.write_text(json.dumps(row) + "\n")
    before = path.read_bytes()
    assert called(*GRID, "--output", str(path)) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert path.read_bytes() == before


def run_broken(path: Path) -> list[dict]:
    """A run after an interruption; the line that was cut off is still there and is none."""
    command = [sys.executable, SCRIPT, *GRID, "--output", str(path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "5 cells, 2 finished" in done.stderr
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
