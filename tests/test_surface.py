"""What `docs/stability.md` promises: few names, each needed by somebody, each one object."""

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import specdec

ROOT = Path(specdec.__file__).parents[1]


def _modules_in(room: str) -> list[str]:
    folder = getattr(importlib.import_module(room), "__path__", [])
    return [f"{room}.{module.name}" for module in pkgutil.iter_modules(folder)]


ROOMS = {
    name: getattr(importlib.import_module(name), "__all__", [])
    for name in ("specdec", *_modules_in("specdec"), *_modules_in("specdec.lab"))
    if name != "specdec.__main__"
}
"""The public names by room."""


def texts_of(*patterns: str) -> list[str]:
    """Of files, without the page of promises."""
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    kept = (p for p in paths if p.name not in ("stability.md", "CHANGELOG.md"))
    return [path.read_text(encoding="utf-8") for path in kept]


def text_of_pages() -> str:
    """Pages and notebooks."""
    notebooks = (json.loads(path.read_text()) for path in ROOT.glob("notebooks/*.ipynb"))
    cells = ("".join(cell["source"]) for book in notebooks for cell in book["cells"])
    return "\n".join([*texts_of("*.md", "docs/*.md", "specdec/**/README.md"), *cells])


def text_of_users() -> str:
    """Pages, notebooks, examples and the programs beside the package."""
    patterns = "docs/figures/*.py", "examples/**/*.py", "benchmarks/**/*.py", "recipes/**/*.py"
    return "\n".join([text_of_pages(), *texts_of(*patterns, "tests/test_types.py")])


RETURNED = {"Estimate", "GenerationResult", "MTPConfig", "RunReport", "SpeculationStats", "Study"}
RETURNED |= {"Source", "Translation"}
"""Names for annotations: what a public function returns or takes."""


def test_every_public_name_is_needed_by_a_page_a_notebook_or_a_program():
    text = text_of_users()
    unused = {n for names in ROOMS.values() for n in names if not re.search(rf"\b{n}\b", text)}
    assert unused <= RETURNED


def test_a_name_in_two_rooms_is_one_object_and_every_name_exists():
    seen = {}
    for room, names in ROOMS.items():
        assert len(names) == len(set(names))
        for name in names:
            value = getattr(importlib.import_module(room), name)
            home = seen.setdefault(name, (room, value))
            assert home[1] is value or {home[0], room} == {"specdec.loop", "specdec.kernels"}


IMPORT = re.compile(r"^from (specdec(?:\.lab)?(?:\.\w+)?) import (\([^)]*\)|.*)$", re.MULTILINE)


def test_a_folder_that_an_older_version_left_hides_no_room(tmp_path, monkeypatch):
    (tmp_path / "zoo" / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr(specdec, "__path__", [*specdec.__path__, str(tmp_path)])
    assert (
        specdec.__getattr__("zoo").load_target
        is importlib.import_module("specdec.lab.zoo").load_target
    )


def test_pages_and_notebooks_import_promised_names_from_rooms():
    modules = {module for room in ("specdec.lab", *ROOMS) for module in _modules_in(room)}
    modules |= {f"specdec.{room.rpartition('.')[2]}" for room in _modules_in("specdec.lab")}
    found = [
        (room, name)
        for room, names in IMPORT.findall(text_of_pages())
        for name in re.findall(r"\w+", re.sub(r"#.*|\bas \w+", "", names))
        if ROOMS.get(room) and name not in ROOMS[room] and f"{room}.{name}" not in modules
    ]
    assert found == []


def test_the_page_names_every_room_with_a_promise():
    page = (ROOT / "docs/stability.md").read_text(encoding="utf-8")
    for room, names in ROOMS.items():
        assert (f"`{room}`" in page) == bool(names), room


def test_the_changelog_has_the_version_first_and_is_short():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE)[0] == specdec.__version__
    assert len(text.split("## 0.1.0")[1].splitlines()) < 25


@pytest.mark.parametrize("name", ["torch", "importlib.metadata"])
def test_the_version_is_cheap(name):
    script = f"import sys, specdec; print(specdec.__version__, {name!r} in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout.split() == [specdec.__version__, "False"]


def test_pyproject_reads_the_version_from_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "specdec.__version__"}
