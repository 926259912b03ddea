"""The import arrows of the design: which part of the package may know which.

A sampler never sees a model, a drafter never sees acceptance, the target never sees a drafter, and
`types` and `graphs` know nothing of the rest. Imports are read with `ast`, also inside functions.
"""

import ast
import sys
from pathlib import Path

import pytest

import specdec

ROOT = Path(specdec.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

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
    "drafters": {
        "types",
        "cache",
        "attention",
        "kernels",
        "samplers",
        "features",
        "slot_model",
    },
    "certify": {"types", "kernels", "samplers", "generator"},
}
# Part -> libraries that it may import, besides Python's own.
LIBRARIES = {
    "types": {"torch"},
    "graphs": {"torch"},
    "kernels": {"torch", "triton", "einops"},
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
    assert {"generator"} <= knows_both <= {"__init__", "generator", "prefill", "zoo", "training"}


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
