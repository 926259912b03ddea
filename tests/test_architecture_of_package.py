"""The house: every import goes down the floors, and public parts say what they are."""

import ast
import graphlib
import importlib
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import specdec

PACKAGE = Path(specdec.__file__).parent
FLOORS = {
    **dict.fromkeys(["arguments", "atomic", "paths", "torch_names", "hf", "processes"], 1),
    **dict.fromkeys(["settings", "tree_shape", "types", "graphs"], 1),
    **dict.fromkeys(["jsonl", "row_step", "statistics", "results"], 2),
    **dict.fromkeys(["lab.trace", "lab.show"], 2),
    **dict.fromkeys(["kernels", "slots", "targets"], 3),
    "samplers": 4,
    "request": 5,
    "drafters": 6,
    "checkpoints": 7,
    **dict.fromkeys(["loop", "lab.zoo", "loading"], 8),
    "generator": 9,
    **dict.fromkeys(["lab.evaluation", "lab.certificates", "lab.inspection"], 10),
    **dict.fromkeys(["lab.training", "lab.integrations"], 10),
    **dict.fromkeys(["lab.cli", "__main__", "lab"], 11),
}
"""Floor of every room, from the ground up, as in section 5 of the design."""
PUBLIC_NAMES = 10.5
"""The floor of `from specdec import Target`: only the command line may do so."""
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    """As it is imported; a folder by the name of the folder."""
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def room_of(name: str) -> str:
    """The part of the package that a module belongs to; "" for the public names."""
    parts = [*name.split("."), ""]
    return ".".join(parts[1:3]).rstrip(".") if parts[1] == "lab" else parts[1]


MODULES = {name_of(file) for file in FILES}


@cache
def imports_of(file: Path) -> list[tuple[int, str]]:
    """Line and module of every import of ours: lazy ones, those for type checkers, and modules that
    strings name (of `import_module`, of lazy tables, begun in f-strings), too.
    """
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.rstrip(".")
            names = [name] if name in MODULES and name != "specdec" else []
        for name in names:
            if name.split(".")[0] == "specdec":
                while name not in MODULES:
                    name = name.rpartition(".")[0]
                found.append((node.lineno, name))
    return found


def cycles_of(imports: dict[str, set[str]]) -> list[list[str]]:
    """Circles of imports, each without the last link of those before it."""
    found, imports = [], {name: others - {name} for name, others in imports.items()}
    while True:
        try:
            graphlib.TopologicalSorter(imports).prepare()
        except graphlib.CycleError as error:
            found.append(circle := error.args[1])
            imports[circle[1]].discard(circle[0])
        else:
            return found


def test_every_room_has_a_floor():
    assert {room_of(name) for name in MODULES} - {""} <= set(FLOORS)


@pytest.mark.smoke
def test_every_import_goes_down_or_stays_on_its_floor():
    for file in FILES:
        room = room_of(name_of(file))
        for line, other in imports_of(file):
            floor = FLOORS.get(room_of(other), PUBLIC_NAMES)
            assert floor <= FLOORS.get(room, 99), f"{file}:{line} imports {other}"


def test_no_two_rooms_import_each_other():
    rooms = {}
    for file in FILES:
        own = rooms.setdefault(room_of(name_of(file)), set())
        own |= {room_of(other) for _, other in imports_of(file)}
    del rooms[""]  # which imports public names from everywhere, on their first use
    assert cycles_of(rooms) == []


def test_no_two_files_import_each_other():
    imports = {name_of(file): {other for _, other in imports_of(file)} for file in FILES}
    del imports["specdec"]
    assert cycles_of(imports) == []


def test_the_zoo_is_reached_by_its_name_alone():
    """What trains and measures is not made for it."""
    pairs = [(room_of(name_of(file)), room_of(o)) for file in FILES for _, o in imports_of(file)]
    assert {room for room, other in pairs if other == "lab.zoo"} == {
        "lab.zoo",
        "loading",
        "lab.cli",
    }


def test_types_graphs_and_kernels_know_nothing_of_what_stands_above_types():
    for file in FILES:
        if (room := room_of(name_of(file))) in ("types", "graphs", "kernels"):
            own = {"kernels": {"types"}, "types": {"tree_shape"}}
            below = {room, "arguments", "torch_names"} | own.get(room, set())
            assert {room_of(other) for _, other in imports_of(file)} <= below


SCRIPT = """
import sys
import specdec
assert "torch" not in sys.modules
from specdec import EagleDrafter, MaskTokenDrafter, MTPDrafter
print(*sys.modules)
specdec.evaluation.compare
from specdec import SpeculativeGenerator
"""


def test_a_script_loads_no_more_than_it_names_also_beside_a_folder_of_the_same_name(tmp_path):
    """Such as a clone of this repository, in whose parent folder somebody works."""
    (tmp_path / "specdec").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    found = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    rooms = {room_of(n) for n in found.stdout.split() if n.startswith("specdec.")}
    assert "drafters" in rooms
    assert rooms & {"checkpoints", "loop", "generator", "results", "request"} == set()


def test_every_file_and_public_part_says_what_it_is():
    for file in FILES:
        tree = ast.parse(file.read_text())
        assert ast.get_docstring(tree), f"{file} has no docstring"
        parts = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        parts += [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        for part in parts:
            if not part.name.startswith("_"):
                assert ast.get_docstring(part), f"{part.name} in {file} has no docstring"


def test_an_import_that_goes_up_or_in_a_circle_would_be_seen(tmp_path):
    file = tmp_path / "guilty.py"
    lines = [
        *("def late():", "    from specdec.lab.zoo import load_target"),
        "    import specdec.lab.cli",
        *("    import_module('specdec.loop.step')", "    import_module(f'specdec.loop.{name}')"),
        "_HOMES = {'specdec.generator': 'SpeculativeGenerator'}",
    ]
    file.write_text("\n".join(lines))
    late = [
        (2, "specdec.lab.zoo"),
        (3, "specdec.lab.cli"),
        (4, "specdec.loop.step"),
        (5, "specdec.loop"),
    ]
    assert sorted(imports_of(file)) == [*late, (6, "specdec.generator")]
    assert cycles_of({"a": {"b"}, "b": {"c"}, "c": {"b"}}) != []
    assert cycles_of({"a": {"b", "c"}, "b": {"c"}}) == []


LIBRARIES = {
    "arguments": {"torch"},
    "types": {"torch"},
    "graphs": {"torch"},
    "kernels": {"torch", "triton", "einops", "numpy"},
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
        if room_of(name_of(file)) == room:
            assert libraries_of(file) <= LIBRARIES[room]


def test_every_library_that_is_imported_is_declared():
    declared = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    groups = declared["dependencies"], *declared["optional-dependencies"].values()
    names = [name for group in groups for name in group]
    known = {re.split(r"[ >=;\[]", name)[0].replace("-", "_") for name in names}
    for file in FILES:
        assert libraries_of(file) <= known, file


def test_public_names_are_imported_on_first_use_from_where_type_checkers_see_them():
    module = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = (node for node in module.body if isinstance(node, ast.If))
    seen = {alias.name: line.module for line in block.body for alias in line.names}
    assert sorted(seen) == sorted(specdec.__all__)
    for name, home in seen.items():
        module = importlib.import_module(home)
        assert getattr(specdec, name) is getattr(module, name)
    assert set(specdec.__all__) <= set(dir(specdec))
    with pytest.raises(AttributeError, match="nothing"):
        _ = specdec.nothing
