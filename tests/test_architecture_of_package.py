"""The floors of the design: every import goes down, and no two rooms import each other.

A sampler never sees a model, a drafter never sees acceptance, the target never sees a drafter, and
`types` and `graphs` import nothing of ours. Imports are read with `ast`, also inside functions.
"""

import ast
import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import specdec

ROOT = Path(specdec.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Rooms, from the ground. Rooms of one floor do not import each other.
FLOORS = [
    ["types", "results", "graphs"],
    ["kernels"],
    ["target"],
    ["samplers"],
    ["request", "heads"],
    ["checkpoints"],
    ["drafters"],
    ["loop"],
    ["generator"],
    ["evaluation"],
    ["inspection", "certify", "training"],
    ["zoo"],
    ["cli"],
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Parts that are files of a room without having its folder yet.
ROOM_OF = {
    **dict.fromkeys(("cache", "attention", "features", "slot_model"), "target"),
    **dict.fromkeys(("options", "inputs"), "request"),
    **dict.fromkeys(("state", "prefill", "processors", "ledger"), "loop"),
}
ROOMS_IN_ORDER = [
    *("heads", "checkpoints", "drafters", "evaluation", "inspection", "training", "zoo", "cli")
]

# Part -> parts of ours that it may import, besides itself.
ARROWS = {
    "types": set(),
    "graphs": set(),
    "kernels": {"types"},
    "samplers": {"types", "kernels"},
    "cache": {"types"},
    "attention": {"cache"},
    "features": set(),
    "slot_model": {"types", "cache", "attention", "features"},
    "target": {"types", "cache", "attention", "features", "slot_model"},
    "certify": {"types", "kernels", "samplers", "generator"},
}
# Part -> libraries that it may import, besides Python's own.
LIBRARIES = {
    "types": {"torch"},
    "graphs": {"torch"},
    "kernels": {"torch", "triton"},
    "samplers": {"torch"},
    "certify": {"torch", "transformers"},
}


def imported(source, module):
    """Full names of everything that a module's source imports; `module` resolves relative ones."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def module_of(path):
    """`specdec.samplers.warp`, or `specdec.samplers.__init__` for a package."""
    return ".".join(["specdec", *path.relative_to(ROOT).with_suffix("").parts])


def files_of(part):
    return [path for path in FILES if module_of(path).split(".")[1] == part]


def parts_and_libraries(part):
    """What the files of a part import: parts of ours, and top-level names of others."""
    names = []
    for path in files_of(part):
        names += imported(path.read_text(), module_of(path))
    ours = {f"{name}.everything".split(".")[1] for name in names if name.startswith("specdec")}
    others = {name.split(".")[0] for name in names if not name.startswith("specdec")}
    return ours - {part}, others - sys.stdlib_module_names


def room_of(name):
    """The room of an imported name or of a module, by its full name."""
    parts = name.split(".")
    if parts[-1] == "__main__":  # an entry point is part of the command line
        return "cli"
    if len(parts) == 2 and parts[1] in specdec.__all__ and parts[1] != "certify":
        parts = getattr(specdec, parts[1]).__module__.split(".")  # where a public name is defined
    return ROOM_OF.get(parts[1], parts[1])


@pytest.mark.parametrize("room", ROOMS_IN_ORDER)
def test_a_room_imports_only_what_is_on_a_floor_below(room):
    seen = set()
    for path in FILES:
        module = module_of(path)
        if room_of(module) == room:
            names = imported(path.read_text(), module)
            seen |= {room_of(name) for name in names if name.startswith("specdec.")}
    above = {other for other in seen - {room} if FLOOR_OF[other] >= FLOOR_OF[room]}
    assert not above
    assert seen


@pytest.mark.parametrize("part", ARROWS)
def test_a_part_imports_only_the_parts_that_it_may_know(part):
    assert files_of(part)
    assert parts_and_libraries(part)[0] <= ARROWS[part]


@pytest.mark.parametrize("part", LIBRARIES)
def test_a_part_imports_only_the_libraries_that_it_needs(part):
    assert parts_and_libraries(part)[1] <= LIBRARIES[part]


def test_only_the_loop_and_its_helpers_know_target_and_drafters():
    knows_both = set()
    for path in FILES:
        names = list(imported(path.read_text(), module_of(path)))
        if all(
            any(n.startswith(f"specdec.{part}") for n in names) for part in ("target", "drafters")
        ):
            knows_both.add(module_of(path).split(".")[1])
    assert {"generator"} <= knows_both <= {"__init__", "generator", "prefill"}


def test_only_the_command_line_and_the_public_names_know_the_certificates():
    knows = set()
    for path in FILES:
        names = imported(path.read_text(), module_of(path))
        if any(f"{name}.".startswith("specdec.certify.") for name in names):
            knows.add(module_of(path).split(".")[1])
    assert knows == {"__init__", "certify", "cli"}


def test_imports_are_seen_in_every_form():
    source = """
import specdec.target
from specdec import Target
from .. import cache
from ..drafters import model
from .noise import Noise
def late():
    from transformers import AutoModel
"""
    assert list(imported(source, "specdec.samplers.rejection")) == [
        "specdec.target",
        "specdec.Target",
        "specdec.cache",
        "specdec.drafters.model",
        "specdec.samplers.noise.Noise",
        "transformers.AutoModel",
    ]


@pytest.mark.parametrize("name", ["specdec", "specdec.drafters", "specdec.training"])
def test_every_public_name_is_there_also_those_that_are_imported_late(name):
    module = import_module(name)
    assert all(getattr(module, public) is not None for public in module.__all__)
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        _ = module.nothing


def test_every_library_that_is_imported_is_declared():
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    optional = {re.match(r"[\w-]+", line)[0] for line in project["optional-dependencies"]["dev"]}
    seen = set()
    for path in FILES:
        seen |= {name.split(".")[0] for name in imported(path.read_text(), module_of(path))}
    assert seen - sys.stdlib_module_names - {"specdec"} - optional == declared
