"""The ablation script: a run per cell; it goes on where it stopped; two processes give the same."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from specdec.evaluation import EvaluatedBatch, EvaluatedRow, Evaluation
from specdec.results import RowStep

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


def grid(monkeypatch, capsys, *arguments: str) -> str:
    """What `benchmarks/grid.py` prints."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["grid.py", *arguments])
    script("benchmarks/grid.py").main()
    return capsys.readouterr().out


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
        tables.append(grid(monkeypatch, capsys, folder))
    assert tables[0] == tables[1]
    assert [line.count("|") for line in tables[0].splitlines()] == [5] * 8
    assert "| mine:Own | 1 | rejection |" in tables[0]
    over = grid(monkeypatch, capsys, "grid", "--over", "lookup,1,block")
    assert len(over.splitlines()) == 7
    assert all(
        line.endswith((".00 |", "|---:|")) or "| +" in line or "| -" in line
        for line in over.splitlines()[2:]
    )
    assert r"\toprule" in grid(monkeypatch, capsys, "grid", "--latex", "--plot", "grid.png")
    assert Path("grid.png").stat().st_size > 1000
    with pytest.raises(ValueError, match=r"no line 'lookup,2,block'; there are lookup,0,block"):
        grid(monkeypatch, capsys, "grid", "--over", "lookup,2,block")


def test_proposals_and_draft_temperatures_are_axes_of_drafters_that_have_them(monkeypatch):
    axes = ["--proposals", "sample", "argmax", "--draft-temperatures", "0.5", "1"]
    shape = ["--drafters", "zoo:eagle3", "lookup", "--samplers", "block", "--limit", "1"]
    cells = run(monkeypatch, *shape, *axes, "--output", "grid")
    kinds = ["draft_temperature=0.5", "draft_temperature=1.0", "proposal=argmax"]
    names = ["lookup/2-0-block", "lookup/2-1-block", "zoo:eagle3/2-0-block"]
    names += [f"zoo:eagle3/2-1-block+{kind}" for kind in kinds]
    assert list(cells) == [f"{name}.0-of-1.jsonl" for name in names]
    headers = [json.loads(f.read_text().splitlines()[0]) for f in Path("grid").glob("zoo*/2-1-*")]
    settings = {str(header["run"]["drafter"]) for header in headers}
    assert len(settings) == 3, settings


def evaluation(accepted):
    """Of prompts that take two steps each, with so many tokens accepted in all."""
    steps = [[RowStep([1, 2], a // 2, [0]), RowStep([1, 2], a - a // 2, [0])] for a in accepted]
    rows = [
        EvaluatedRow(str(i), "", 0, 0, 4, False, "length", None, of_prompt)
        for i, of_prompt in enumerate(steps)
    ]
    return Evaluation([EvaluatedBatch(i, [1.0], [row]) for i, row in enumerate(rows)], 2)


@pytest.mark.parametrize(
    ("accepted", "bold"),
    [
        # Prompts differ more than drafters do; b is better on each, and the intervals overlap.
        ({"a": [0, 1, 2, 3, 0, 1, 2, 3], "b": [1, 2, 3, 4, 1, 2, 3, 4]}, {"b"}),
        ({"a": [0, 1, 2, 3, 0, 1, 2, 3], "b": [1, 0, 2, 4, 0, 1, 1, 4]}, set()),
        ({"a": [0] * 8, "b": [1, 2] * 4, "c": [2, 1] * 4}, set()),
        ({"a": [0] * 8, "b": [1, 2] * 4, "c": [2, 3] * 4}, {"c"}),
        ({"a": [0, 1, 2], "b": [1, 2, 3]}, set()),  # too few for an interval
        ({"a": [1] * 8}, set()),  # best of nothing
    ],
)
def test_a_best_cell_is_bold_where_it_is_better_on_the_same_prompts(accepted, bold):
    lines = {}
    for name, counts in accepted.items():
        found = evaluation(counts)
        lines[name, 0.0, "block"] = {2: found, 4: found}
        lines[name, 1.0, "block"] = {2: found}
    table = script("benchmarks/grid.py").table(lines, "acceptance_length")
    for name, temperature, _, *cells in table.rows:
        shown = [cell for cell in cells if cell]
        assert len(shown) == (2 if temperature == "0" else 1)
        for cell in shown:
            assert (cell.startswith("**") and cell.endswith("**")) is (name in bold)
