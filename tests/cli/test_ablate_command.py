"""`specdec ablate` is `sweep` with the arguments of a file."""

import json
import re

import pytest

from specdec.lab.cli import main
from specdec.lab.evaluation import Study, sweep
from specdec.lab.evaluation.sweep import read_study

STUDY = """
drafters = ["lookup", "{folder}/mine.py:make"]
drafts = [1, 2]
temperatures = [0, 1]
limit = 6
max_new_tokens = 4
batch_size = 6
"""
MINE = """
from specdec import SuffixDrafter

def make(target, num_draft_tokens):
    return SuffixDrafter(num_draft_tokens)
"""


@pytest.fixture(scope="module", name="study")
def _study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    (folder / "mine.py").write_text(MINE)
    (folder / "study.toml").write_text(STUDY.format(folder=folder))
    return folder / "study.toml"


def test_the_command_prints_what_the_function_returns_and_keeps_its_file(study, capsys):
    assert main(["ablate", str(study)]) == 0
    printed = capsys.readouterr().out.strip()
    expected = sweep(**read_study(study))
    assert printed == expected.to_text()
    folder = study.with_suffix("")
    assert (folder / "study.toml").read_text() == study.read_text()
    arguments = ["--minus", "drafter=lookup", "--columns", "temperature", "--format", "markdown"]
    assert main(["ablate", str(folder), *arguments]) == 0
    loaded = Study.load(folder)
    (table,) = loaded.tables("temperature", minus={"drafter": "lookup"})
    assert capsys.readouterr().out.strip() == table.markdown()
    assert main(["ablate", str(folder), "--format", "json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["acceptance_length"] for cell in cells] == [
        record["acceptance_length"] for record in expected.records()
    ]
    arguments = ["--minus", "drafter=lookup", "--of", "acceptance_rate", "--format", "json"]
    assert main(["ablate", str(folder), *arguments]) == 0
    minus = json.loads(capsys.readouterr().out)["minus"]
    tests = loaded.test({"drafter": "lookup"}, of="acceptance_rate")
    assert (minus["cell"], minus["of"]) == ({"drafter": "lookup"}, "acceptance_rate")
    assert [[pair["p_value"], pair["adjusted"]] for pair in minus["pairs"]] == [
        [test.p_value, test.adjusted] for test in tests.tests
    ]
    assert minus["note"] == tests.note()


def test_a_value_of_null_is_called_own_in_files_and_options(tmp_path, capsys):
    file = tmp_path / "study.toml"
    file.write_text(
        'drafters = ["lookup", "none"]\ndrafts = [1]\ntemperatures = [1]\nlimit = 6\n'
        'max_new_tokens = 4\nbatch_size = 6\nvary = {proposal = ["own", "argmax"]}\n'
    )
    assert main(["ablate", str(file), "--minus", "drafter=none,proposal=own"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "minus that of none, own; p by all label swaps within 6 prompts" in printed


def test_the_figure_is_a_file(study, tmp_path, capsys):
    pytest.importorskip("matplotlib").use("agg")
    assert main(["ablate", str(study), "--plot", str(tmp_path / "a.svg")]) == 0
    assert (tmp_path / "a.svg").read_text().count("</svg>") == 1


def test_a_study_is_watched_until_all_of_its_cells_are_there(study, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "study"
    sweep(**read_study(study) | {"temperatures": [0]}, output=folder)
    assert main(["ablate", str(folder)]) == 0
    expected, cells = capsys.readouterr().out, sorted(folder.glob("*.jsonl"))
    for cell in cells:
        cell.rename(tmp_path / cell.name)
    before, slept = sorted(folder.iterdir()), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        assert sorted(folder.iterdir()) == before  # it only reads
        (tmp_path / cells[len(slept) - 1].name).rename(cells[len(slept) - 1])
        before[:] = sorted(folder.iterdir())

    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setattr("time.sleep", sleep)
    assert main(["ablate", str(folder), "--watch"]) == 0
    printed = capsys.readouterr()
    assert printed.out == expected
    assert len(slept) == len(cells) == 4
    frames = dict.fromkeys(re.findall(r"\d of \d cells|out: \d cell", printed.err))
    counts = ["0 of 4 cells", "out: 3 cell", "1 of 4 cells", "out: 2 cell", "2 of 4 cells"]
    assert list(frames) == [*counts, "out: 1 cell", "3 of 4 cells"]


REFUSED = [
    (["nowhere.toml"], "there is no study nowhere.toml"),
    (["STUDY", "--plot", "nowhere/a.png"], "there is no folder nowhere"),
    (["WRONG"], "a study has no argument 'drafter': did you mean 'drafters'?"),
    (["FOLDER"], "no folder of a study"),
    (["STUDY", "--minus", "lookup"], "must be axes with values like drafter=lookup"),
    (["STUDY", "--minus", "colour=red"], "an axis must be"),
    (["STUDY", "--of", "speed"], "of must be"),
    (["WRONG", "--watch"], "--watch shows the folder of a study, and"),
    (["FOLDER", "--watch"], "no folder of a study"),
]


@pytest.mark.parametrize(("arguments", "why"), REFUSED)
def test_what_cannot_be_is_one_line(arguments, why, study, tmp_path, capsys):
    (tmp_path / "wrong.toml").write_text("drafter = ['lookup']")
    places = {"STUDY": str(study), "FOLDER": str(tmp_path), "WRONG": str(tmp_path / "wrong.toml")}
    assert main(["ablate", *(places.get(a, a) for a in arguments)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("specdec: ")
    assert why in line
    assert not (tmp_path / "wrong").exists()
