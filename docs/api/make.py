"""Writes a table of each module's public names into the pages of this folder, above its reference.

    python docs/api/make.py

On the site mkdocstrings shows docstrings whole; in a clone these tables say what is where.
"""

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
MODULE = re.compile(r"(?:^`specdec/[^\n]*`\n\n(?:\|.*\n)*\n)?^::: (\S+)$", re.MULTILINE)


def sentence(node: ast.ClassDef | ast.FunctionDef) -> str:
    """The first one of a docstring."""
    paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.])\s+(?=[A-Z`])", paragraph)[0].replace("|", "\\|")


def called(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Its name, of a function with the names of its arguments."""
    if isinstance(node, ast.ClassDef):
        return f"`{node.name}`"
    given = node.args
    names = [arg.arg for arg in (*given.posonlyargs, *given.args)]
    names += ["*"] * bool(given.kwonlyargs) + [arg.arg for arg in given.kwonlyargs]
    return f"`{node.name}({', '.join(names)})`"


def methods(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Those of a class, as they are called."""
    of_class = node.body if isinstance(node, ast.ClassDef) else ()
    own = [n for n in of_class if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
    calls = [n for n in own if not any("property" in ast.unparse(d) for d in n.decorator_list)]
    names = [called(n).replace("(self, ", "(").replace("(self)", "()") for n in calls]
    return f" Methods: {', '.join(names)}." if names else ""


def table(found: re.Match) -> str:
    """The table of a module, or of one of its names, and its reference; the reference alone of a
    module that defines nothing.
    """
    file, only = file_of(found[1]), None
    if not file.exists():
        module, _, only = found[1].rpartition(".")
        file = file_of(module)
    kinds = ast.ClassDef, ast.FunctionDef
    nodes = [n for n in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(n, kinds)]
    public = [n for n in nodes if n.name == only or not (only or n.name.startswith("_"))]
    rows = [f"| {called(node)} | {sentence(node)}{methods(node)} |" for node in public]
    if not rows:
        return f"::: {found[1]}"
    lines = [f"`{file.relative_to(ROOT).as_posix()}`", "", "| name | |", "|---|---|", *rows, ""]
    return "\n".join([*lines, f"::: {found[1]}"])


def file_of(module: str) -> Path:
    """Where a module stands; a file that is not there for other names."""
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def pages() -> dict[Path, str]:
    """What each page is to hold."""
    files = sorted(FOLDER.glob("*.md"))
    return {file: MODULE.sub(table, file.read_text(encoding="utf-8")) for file in files}


if __name__ == "__main__":
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
