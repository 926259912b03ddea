"""How many files of the library an import of one part loads: a branch imports what it needs."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import specdec

ROOT = Path(specdec.__file__).parents[1]
MOST = {
    "specdec.drafters.eagle": 46,
    "specdec.drafters.mtp.drafter": 51,
    "specdec.drafters.mask_token.drafter": 52,
    "specdec.targets.target": 40,
    "specdec.generator": 76,
}


def file_of(name: str) -> Path | None:
    """Of a module or a package; `None` where a name is none of ours."""
    stem = ROOT.joinpath(*name.split("."))
    files = stem.with_suffix(".py"), stem / "__init__.py"
    return next((file for file in files if file.is_file()), None)


def imported(statements: list[ast.stmt]) -> Iterator[str]:
    """Names that a file imports when it is loaded, those for type checkers left out."""
    for node in statements:
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.If | ast.Try):
            is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            yield from imported(node.orelse if is_typing else [*node.body, *node.orelse])


def homes(package: Path) -> dict[str, str]:
    """Where names are that a package imports on their first use."""
    name = ".".join(package.relative_to(ROOT).parent.parts)
    for node in ast.parse(package.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOMES":
            table = ast.literal_eval(node.value)
            full = {
                home: home if home.startswith("specdec") else f"{name}.{home}" for home in table
            }
            return {one: full[home] for home, names in table.items() for one in names.split()}
    return {}


def loaded_by(name: str) -> set[str]:
    """Modules that an import of one loads."""
    found: set[str] = set()
    todo = [name]
    while todo:
        name = todo.pop()
        while file_of(name) is None and "." in name:
            name, _, attribute = name.rpartition(".")
            file = file_of(name)
            if file is not None and file.name == "__init__.py":
                todo += filter(None, [homes(file).get(attribute)])
        if name in found or file_of(name) is None or name.split(".")[0] != "specdec":
            continue
        found.add(name)
        todo += [name.rpartition(".")[0]] * ("." in name)
        todo += imported(ast.parse(file_of(name).read_text()).body)
    return found


@pytest.mark.parametrize("name", MOST)
def test_a_part_loads_few_files(name):
    found = loaded_by(name)
    assert "specdec.types" in found
    assert len(found) <= MOST[name], sorted(found)


def test_an_import_of_a_branch_loads_nothing():
    assert [*imported(ast.parse("def late():\n    import specdec.loading").body)] == []
    assert "specdec.targets.views" not in loaded_by("specdec.targets.target")
