"""The notebooks run as they stand and print what is stored, are short, and hold nothing of the
machine they ran on.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from outputs import differences

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_CELLS = 25
MAX_SECONDS = 60
"""Of an otherwise idle machine with two cores; the test allows more."""


def cells_of(path: Path, kind: str) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def printed(path: Path) -> list[tuple[str, bool]]:
    """The texts below each cell of code, and whether its numbers are no times (the tag `times`)."""
    texts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            of = [o.get("text") or o["data"].get("text/plain", "") for o in cell["outputs"]]
            is_timed = "times" in cell["metadata"].get("tags", [])
            texts.append(("\n".join("".join(text) for text in of), not is_timed))
    return texts


def test_there_are_eight_and_they_are_numbered():
    assert [path.name[0] for path in NOTEBOOKS] == ["1", "2", "3", "4", "5", "6", "7", "8"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_begins_with_a_title_and_its_code_is_python(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert len(notebook["cells"]) <= MAX_CELLS
    assert cells_of(path, "markdown")[0].startswith(f"# {path.name[0]} · ")
    for source in cells_of(path, "code"):
        ast.parse(source)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_hold_no_error_and_no_path_of_a_machine(path):
    text = path.read_text(encoding="utf-8")
    assert '"output_type": "error"' not in text
    for folder in ("/home/", "/root/", "/tmp/", "/work/", "/Users/"):
        assert folder not in text
    counts = [c["execution_count"] for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))  # run from the top


def test_they_name_every_part_that_they_are_about():
    text = {path.name[0]: "\n".join(cells_of(path, "code")) for path in NOTEBOOKS}
    assert "RejectionSampler" in text["1"]
    for part in ("context", "propose", "verify", "verdict", "commit"):
        assert part in text["2"]
    assert "zoo.DRAFTERS" in text["3"]  # new ones appear by themselves
    assert "draft_probs" in text["4"]
    assert "class SuffixDrafter(Drafter)" in text["5"]
    assert "certify(generator" in text["5"]
    assert "triton" in text["6"]
    assert "Captured" in text["6"]
    assert "step.path" in text["7"]
    assert "step.rejected" in text["7"]
    assert "speculate(trainer" in text["8"]
    assert 'one["weights"] == plain["weights"]' in text["8"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    if "from trl import" in "\n".join(cells_of(path, "code")):
        pytest.importorskip("trl")
    (tmp_path / "notebooks").mkdir()
    for name in (path.name, "run.py"):
        (tmp_path / "notebooks" / name).write_bytes((ROOT / "notebooks" / name).read_bytes())
    command = [sys.executable, "notebooks/run.py", path.stem]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    options = {"capture_output": True, "text": True, "timeout": 10 * MAX_SECONDS}
    done = subprocess.run(command, cwd=tmp_path, env=environment, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = json.loads((tmp_path / "notebooks" / path.name).read_text())
    outputs = [cell.get("outputs") for cell in shown["cells"] if cell["cell_type"] == "code"]
    assert any(outputs)
    (seconds,) = [line for line in done.stderr.splitlines() if line.startswith(path.stem)]
    assert int(seconds.split()[-2]) < 5 * MAX_SECONDS
    pairs = zip(printed(path), printed(tmp_path / "notebooks" / path.name), strict=True)
    for (stored, is_compared), (new, _) in pairs:
        found = differences(stored, new, numbers=is_compared)
        assert not found, "run notebooks/run.py, and read what has changed:\n" + "\n".join(found)


def test_a_notebook_that_is_not_there_is_one_line():
    pytest.importorskip("nbclient")
    command = [sys.executable, str(ROOT / "notebooks" / "run.py"), "notebooks/9_nothing.ipynb"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: there is no notebook '9_nothing'; expected one of 1_accept_rule")
