"""The ablation script: a run per cell; it goes on where it stopped; two processes give the same."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from specdec.evaluation import Estimate, Evaluation

ROOT = Path(__file__).parents[2]
GRID = [
    *("--drafters", "lookup", "mine:Own", "--num-draft-tokens", "2", "--temperatures", "0", "1"),
    *("--samplers", "block", "rejection", "--limit", "2", "--max-new-tokens", "4"),
    *("--batch-size", "1"),
]
DRAFTERS = """
from specdec import PromptLookupDrafter


class Own(PromptLookupDrafter):
    def __init__(self, target, num_draft_tokens):
        super().__init__(num_draft_tokens, max_ngram=target.config.num_hidden_layers)
"""


def script(path: str):
    """A script as a module."""
    spec = spec_from_file_location(Path(path).stem, ROOT / path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    """A working folder that has a module with a drafter."""
    (tmp_path / "mine.py").write_text(DRAFTERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)


def run(monkeypatch, *arguments: str, rank: int = 0, count: int = 1) -> dict[str, list]:
    """Texts by the files of the folder, after a run of one process of several."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(count))
    monkeypatch.setattr(sys, "argv", ["ablate.py", *GRID, *arguments])
    script("examples/ablate.py").main()
    files = sorted(Path(arguments[-1]).glob("*/*.jsonl"))
    return {"/".join(f.parts[-2:]): texts(Evaluation.load(f)) for f in files}


def texts(evaluation: Evaluation) -> list:
    return [(row.prompt, row.new_tokens) for row in evaluation.rows]


def test_a_run_per_cell_is_gone_on_with_shared_by_processes_and_shown(monkeypatch, capsys):
    whole = run(monkeypatch, "--output", "grid")
    cells = ["2-0-block", "2-1-block", "2-1-rejection"]  # samplers that are one rule are one cell
    assert list(whole) == [f"{d}/{c}.0-of-1.jsonl" for d in ("lookup", "mine:Own") for c in cells]
    cut = Path("grid/lookup/2-1-block.0-of-1.jsonl")
    header = json.loads(cut.read_text().splitlines()[0])["run"]
    assert header["drafter"]["num_draft_tokens"] == header["plan"]["max_new_tokens"] - 2 == 2
    cut.write_bytes(cut.read_bytes()[:-30])  # killed while writing
    assert run(monkeypatch, "--output", "grid") == whole
    with pytest.raises(ValueError, match=r"plan.seed \(0 there, 9 here\)"):
        run(monkeypatch, "--seed", "9", "--output", "grid")
    for rank in range(2):
        parts = run(monkeypatch, "--output", "shared", rank=rank, count=2)
    assert len(parts) == 2 * len(whole)
    shards = [Evaluation.load(f) for f in Path("shared/mine:Own").glob("2-1-block.*")]
    assert texts(Evaluation.merged(shards)) == whole["mine:Own/2-1-block.0-of-1.jsonl"]
    tables = []
    capsys.readouterr()
    for folder in ("grid", "shared"):
        script("benchmarks/grid.py").main(Path(folder), "acceptance_length")
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]
    assert [line.count("|") for line in tables[0].splitlines()] == [5] * 8
    assert "| mine:Own | 1 | rejection |" in tables[0]


@pytest.mark.parametrize(
    ("intervals", "bold"),
    [
        ({"a": (1.0, 2.0), "b": (2.1, 3.0)}, {"b"}),
        ({"a": (1.0, 2.2), "b": (2.1, 3.0)}, set()),  # they overlap
        ({"a": (1.0, 2.0), "b": (2.1, 2.3), "c": (2.25, 3.0)}, set()),
        ({"a": (1.0, 2.0), "b": (2.1, 2.3), "c": (2.4, 3.0)}, {"c"}),
        ({"a": None, "b": (2.1, 3.0)}, set()),  # nothing is known of one
        ({"a": (1.0, 2.0)}, set()),  # best of nothing
    ],
)
def test_a_best_cell_is_bold_where_its_interval_is_apart(intervals, bold):
    lines = {}
    for name, ends in intervals.items():
        found = Estimate(1.5) if ends is None else Estimate(sum(ends) / 2, *ends)
        lines[name, 0.0, "block"] = {2: found, 4: found}
        lines[name, 1.0, "block"] = {2: found}
    for name, temperature, _, *cells in script("benchmarks/grid.py").table(lines, ".2f").rows:
        shown = [cell for cell in cells if cell]
        assert len(shown) == (2 if temperature == "0" else 1)
        for cell in shown:
            assert (cell.startswith("**") and cell.endswith("**")) is (name in bold)
