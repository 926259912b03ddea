"""Every figure says by which command, at which commit and where it was made, and one whose code has
changed since is listed.
"""

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import specdec

ROOT = Path(specdec.__file__).parents[1]
ENTRY = """
["{name}"]
commit = "{commit}"
device = "one CPU core"
command = "python draw.py"
code = ["drawing", "line.py"]
"""
TABLE = "| rule | ms |\n|---|---|\n| a | 1.25 |\n| b | 2.50 |\n"


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    program = [sys.executable, root / "docs/figures/made.py", *arguments]
    return subprocess.run(program, capture_output=True, text=True)


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", root, "-c", "user.name=A", "-c", "user.email=a@b.c", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def commit(root: Path) -> str:
    git(root, "add", "-A")
    git(root, "commit", "-qm", "One more.")
    return git(root, "rev-parse", "--short=7", "HEAD")


@pytest.fixture(name="clone")
def _clone(tmp_path):
    """A repository with a picture, and a table in a page."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    for folder in ("docs/figures", "benchmarks/figures"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "docs/figures/made.py").write_text((ROOT / "docs/figures/made.py").read_text())
    (tmp_path / "docs/figures/line.svg").write_text("<svg/>")
    (tmp_path / "docs/speed.md").write_text(f"# Speed\n\n{TABLE}")
    for name in ("draw.py", "line.py", "other.py"):
        (tmp_path / name).write_text("A = 1\n")
    git(tmp_path, "init", "-q")
    made_at = commit(tmp_path)
    entries = [
        ENTRY.format(name=n, commit=made_at)
        for n in ("docs/figures/line.svg", "docs/speed.md: rule, ms")
    ]
    text = "".join(['[code]\ndrawing = ["draw.py"]\n', *entries])
    (tmp_path / "docs/figures/made.toml").write_text(text)
    commit(tmp_path)
    return tmp_path


def test_every_figure_of_this_repository_has_a_whole_entry():
    made = runpy.run_path(str(ROOT / "docs/figures/made.py"))
    assert made["faults"](made["read"]()) == []


def test_a_figure_is_listed_from_a_change_of_its_code_until_it_is_made_again(clone):
    (clone / "other.py").write_text("A = 2\n")
    commit(clone)
    assert run(clone).stdout.startswith("0 of 2 figures and tables are older")
    for name in ("draw.py", "line.py"):
        (clone / name).write_text("A = 2\n")
        commit(clone)
    listed = run(clone).stdout
    assert listed.startswith("2 of 2 figures and tables are older than their code:")
    assert "one CPU core: python draw.py\n    changed: draw.py and 1 more" in listed
    name = "docs/speed.md: rule, ms"
    assert run(clone, name).returncode == 1
    done = run(clone, "--made", name, "--device", "two H100")
    assert (done.returncode, done.stdout[:6]) == (0, "0 of 1")
    assert 'device = "two H100"' in (clone / "docs/figures/made.toml").read_text()
    assert run(clone).stdout.startswith("1 of 2 figures")


@pytest.mark.parametrize(
    ("changed", "is_older"),
    [
        ('"""What A is."""\nA = 1  # one\n"""More."""\n', False),
        ("A = (\n    1\n)\n", False),
        ("A = 2\n", True),
        (None, True),
    ],
)
def test_a_comment_ages_no_figure_and_a_number_does(clone, changed, is_older):
    (clone / "line.py").write_text(changed) if changed else (clone / "line.py").unlink()
    (clone / "new.py").write_text("A = 3\n")
    if changed is None:  # the path of an entry exists
        (clone / "line.py").mkdir()
        (clone / "line.py/a.txt").write_text("1")
    commit(clone)
    assert run(clone, "docs/figures/line.svg").returncode == int(is_older)


def test_a_weight_or_a_toml_ages_a_figure(clone):
    entry = '["{name}"]\ncommit = "{at}"\ndevice = "x"\ncommand = "x"\ncode = ["w.bin", "a.toml"]\n'
    manifest = clone / "docs/figures/made.toml"
    for name in ("w.bin", "a.toml"):
        (clone / name).write_bytes(b"\x01")
        (clone / "docs/figures/weights.svg").write_text("<svg/>")
    at = commit(clone)
    text = entry.format(name="docs/figures/weights.svg", at=at)
    manifest.write_text(manifest.read_text() + text)
    commit(clone)
    assert run(clone, "docs/figures/weights.svg").returncode == 0
    for name in ("w.bin", "a.toml"):
        (clone / name).write_bytes(b"\x02")
        commit(clone)
        done = run(clone, "docs/figures/weights.svg")
        assert done.returncode == 1
        assert "changed: " in done.stdout
        run(clone, "--made", "docs/figures/weights.svg")


def test_a_figure_of_texts_is_as_old_as_they_and_not_as_the_library(clone):
    name, manifest = "docs/figures/texts.svg", clone / "docs/figures/made.toml"
    program, library = clone / "docs/figures/texts.py", clone / "specdec/loop.py"
    library.parent.mkdir()
    for file, text in ((library, "A = 1\n"), (program, "print('a')\n"), (clone / name, "<svg/>")):
        file.write_text(text)
    (clone / "a.toml").write_text("a = 1\n")
    entry = ENTRY.format(name=name, commit=commit(clone)).replace(
        '"drawing", "line.py"', '"specdec", "a.toml"'
    )
    manifest.write_text(f'{manifest.read_text()}{entry}texts = "a"\n')
    library.write_text("A = 2\n")
    commit(clone)
    assert run(clone, name).returncode == 0
    program.write_text("print('b')\n")
    listed = run(clone, name)
    assert (listed.returncode, "changed: what the zoo writes" in listed.stdout) == (1, True)
    assert run(clone, "--made", name).returncode == 0
    (clone / "a.toml").write_text("a = 2\n")
    commit(clone)
    assert "changed: a.toml" in run(clone, name).stdout


def test_a_figure_is_not_made_with_code_that_is_in_no_commit(clone):
    (clone / "line.py").write_text("A = 3\n")
    done = run(clone, "--made", "docs/figures/line.svg")
    assert done.returncode == 1
    assert done.stderr.startswith("error: commit the code of docs/figures/line.svg first")
    done = run(clone, "docs/figures/circle.svg")
    assert (
        done.stderr == "error: made.toml has no entry 'docs/figures/circle.svg'; write one first\n"
    )


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("path", "old", "new", "said"),
    [
        ("docs/speed.md", "| ms |", "| s |", "docs/speed.md: rule, s has no entry"),
        ("docs/speed.md", TABLE, "", "docs/speed.md: rule, ms has an entry, and is not there"),
        ("docs/figures/made.toml", 'device = "one CPU core"', "", "line.svg has no device"),
        (
            "docs/figures/made.toml",
            '"draw.py"]',
            '"draws.py"]',
            "draws.py, of its code, does not exist",
        ),
        ("docs/figures/made.toml", 'commit = "', 'commit = "f', "is not in the history"),
        ("docs/figures/made.toml", "commit = ", "# ", "line.svg has no commit"),
    ],
)
def test_an_entry_that_is_missing_or_wrong_fails(clone, path, old, new, said):
    edit(clone / path, old, new)
    done = run(clone)
    assert done.returncode == 1
    assert said in done.stdout


def test_a_picture_without_an_entry_fails(clone):
    (clone / "benchmarks/figures/new.md").write_text(TABLE)
    done = run(clone)
    assert (done.returncode, done.stdout.split(" has")[0]) == (1, "benchmarks/figures/new.md")


def test_without_a_history_it_is_said_that_nothing_is_known(clone, tmp_path_factory):
    shallow = tmp_path_factory.mktemp("shallow")
    git(shallow, "clone", "-q", "--depth", "1", f"file://{clone}", str(shallow / "clone"))
    shutil.rmtree(clone / ".git")
    for root in (clone, shallow / "clone"):
        done = run(root)
        assert done.returncode == 0
        assert done.stdout.startswith("figures: this clone has no history")


def test_what_the_page_of_training_says_of_its_curves_is_in_their_data():
    curves = json.loads((ROOT / "docs/figures/training.json").read_text())
    page = (ROOT / "docs/training.md").read_text()
    ends = [(rows[-2][i], rows[-1][i]) for rows in curves.values() for i in (3, 4)]
    names = ["none", "one", "two", "three", "four", "five", "all"]
    falling = names[sum(last < before for before, last in ends)]
    assert f"{falling} of the six curves end below the measurement before their last" in page
    assert len(ends) == 6
    greedy = re.search(r"ten million tokens ([\d.]+), ([\d.]+) and ([\d.]+) at", page).groups()
    assert list(greedy) == [f"{rows[-1][3]:.1f}" for rows in curves.values()]
