"""The house: every import goes down the floors, and public parts say what they are."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import specdec

PACKAGE = Path(specdec.__file__).parent
FLOORS = [
    {"arguments", "settings", "show", "jsonl"},
    {"types", "results", "graphs"},
    {"kernels", "trace"},
    {"target"},
    {"samplers"},
    {"request", "heads"},
    {"checkpoints"},
    {"drafters"},
    {"loop"},
    {"generator"},
    {"evaluation"},
    {"inspection", "certify", "training"},
    {"zoo"},
    {"cli"},
]
"""From the ground up; rooms of one floor do not know each other."""
ENTRANCES = {"__init__", "__main__"}
FILES = sorted(PACKAGE.rglob("*.py"))


def floor_of(room: str) -> int:
    """Public names (`from specdec import Target`) lie above everything but the command line."""
    own = (level for level, rooms in enumerate(FLOORS) if room in rooms)
    return next(own, len(FLOORS) - 1.5)


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(file: Path) -> list[tuple[int, str]]:
    """Line and room of every import of ours, those inside functions included."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module]
            if node.module == "specdec":
                names = [f"specdec.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found += [(node.lineno, n.split(".")[1]) for n in names if n.startswith("specdec.")]
    return found


def test_every_room_has_a_floor():
    rooms = {room_of(file) for file in FILES} - ENTRANCES
    assert rooms == set.union(*FLOORS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_every_import_goes_down(file):
    room = room_of(file)
    if room in ENTRANCES or file.stem == "__main__":
        return
    for line, other in imports_of(file):
        if other != room:
            assert floor_of(other) < floor_of(room), f"{file}:{line} imports {other}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_every_file_and_public_part_says_what_it_is(file):
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree), f"{file} has no docstring"
    parts = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    parts += [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for part in parts:
        if not part.name.startswith("_"):
            assert ast.get_docstring(part), f"{part.name} in {file} has no docstring"


def test_an_import_that_goes_up_would_be_seen(tmp_path):
    file = tmp_path / "guilty.py"
    lines = "def late():", "    from specdec.zoo import load_target", "    import specdec.cli"
    file.write_text("\n".join(lines))
    assert imports_of(file) == [(2, "zoo"), (3, "cli")]


LIBRARIES = {
    "arguments": {"torch"},
    "types": {"torch"},
    "graphs": {"torch"},
    "kernels": {"torch", "triton", "einops"},
    "samplers": {"torch"},
}
"""Libraries that a room may import, besides Python's own."""


def libraries_of(file: Path) -> set[str]:
    """Libraries that a file imports, besides Python's own and ours."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"specdec"}


@pytest.mark.parametrize("room", LIBRARIES)
def test_a_room_imports_only_the_libraries_that_it_needs(room):
    for file in FILES:
        if room_of(file) == room:
            assert libraries_of(file) <= LIBRARIES[room]


def test_every_library_that_is_imported_is_declared():
    declared = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    groups = declared["dependencies"], *declared["optional-dependencies"].values()
    names = [name for group in groups for name in group]
    known = {re.split(r"[ >=;\[]", name)[0].replace("-", "_") for name in names}
    for file in FILES:
        assert libraries_of(file) <= known, file


def test_a_folder_of_the_same_name_beside_a_script_does_not_hide_the_package(tmp_path):
    """Such as a clone of this repository, in whose parent folder somebody works."""
    (tmp_path / "specdec").mkdir()
    script = tmp_path / "script.py"
    script.write_text("from specdec import SpeculativeGenerator")
    subprocess.run([sys.executable, script], cwd=tmp_path, check=True)


def test_public_names_are_imported_on_first_use_from_where_type_checkers_see_them():
    module = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = (node for node in module.body if isinstance(node, ast.If))
    seen = {alias.name: line.module for line in block.body for alias in line.names}
    assert sorted(seen) == sorted(specdec.__all__)
    for name, home in seen.items():
        assert getattr(specdec, name) is getattr(importlib.import_module(home), name)
    assert set(specdec.__all__) <= set(dir(specdec))
    with pytest.raises(AttributeError, match="module 'specdec' has no attribute 'nothing'"):
        _ = specdec.nothing
    code = "import specdec, sys; assert 'torch' not in sys.modules; specdec.evaluation.compare"
    subprocess.run([sys.executable, "-c", code], check=True)
