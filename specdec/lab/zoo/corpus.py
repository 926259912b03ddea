"""The standard library's sources: what the zoo is trained on, and modules that no training saw.

Training reads the sources of the running interpreter. The held-out modules are those of CPython
3.11.7 and lie in the package with their licence, so prompts are the same on every Python.
"""

from __future__ import annotations

import re
import sysconfig
import zipfile
from pathlib import Path

from specdec.arguments import check_integer

# No training sees these modules, the tokenizer's included.
HELD_OUT = (
    "textwrap.py", "statistics.py", "fractions.py", "calendar.py", "configparser.py", "csv.py",
    "heapq.py", "bisect.py", "queue.py", "graphlib.py", "ipaddress.py", "shlex.py", "string.py",
    "colorsys.py", "zipapp.py", "sched.py",
)  # fmt: skip

SKIPPED_FOLDERS = frozenset((
    "site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings",
    "pydoc_data", "ensurepip", "__pycache__", "testing",
))  # fmt: skip
# Tables rather than programs: a language model learns nothing about Python from them.
SKIPPED_FILES = ("config-*/*", "**/_sysconfigdata*.py", "html/entities.py", "stringprep.py")

_BLOCK_START = re.compile(r"^ *(?:async def|def|class) ")


def stdlib_root() -> Path:
    """Return the folder that holds the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def library_files() -> list[Path]:
    """List the standard library's sources that training may see, sorted by relative path.

    Returns:
        Paths of `.py` files, without tests, generated tables and the `HELD_OUT` modules.

    Example:
        >>> any(path.name == "textwrap.py" for path in library_files())
        False
    """
    root = stdlib_root()
    found = sources_of(root, skipped=(*SKIPPED_FILES, *HELD_OUT))
    if not found:
        raise FileNotFoundError(
            f"no Python sources under {root}: expected the standard library as .py files, "
            "use an interpreter that ships them"
        )
    return found


def sources_of(root: Path, *, skipped: tuple[str, ...]) -> list[Path]:
    """List the non-empty `.py` files under `root`, sorted by relative path."""
    skipped_files = {path for pattern in skipped for path in root.glob(pattern)}
    found = []
    for path in root.rglob("*.py"):
        folders = path.relative_to(root).parts[:-1]
        is_skipped = path in skipped_files or not SKIPPED_FOLDERS.isdisjoint(folders)
        if not is_skipped and path.stat().st_size:
            found.append(path)
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def heldout_files() -> list[zipfile.Path]:
    """List the sources of the `HELD_OUT` modules, in the order of that tuple.

    Returns:
        Paths within the package's archive of CPython 3.11.7's sources.

    Example:
        >>> heldout_files()[0].name
        'textwrap.py'
    """
    archive = zipfile.Path(Path(__file__).with_name("heldout.zip"))
    return [archive / name for name in HELD_OUT]


def read_source(path: Path | zipfile.Path) -> str:
    """Return a source's text; odd bytes are replaced, since a few old modules are not UTF-8."""
    return path.read_text(encoding="utf-8", errors="replace")


def heldout_prompts(n: int, *, num_lines: int = 10) -> list[str]:
    """Cut `n` deterministic prompts out of modules that no training saw.

    Args:
        n: How many prompts, at least 1.
        num_lines: Lines of context per prompt; the last one opens a `def` or `class` block.

    Returns:
        `n` texts of `num_lines` lines (10 lines are about 50 to 180 tokens), cycling over the
        held-out modules. A module's prompts repeat once all its blocks have been used.

    Example:
        >>> from specdec.lab import zoo
        >>> len(zoo.heldout_prompts(3))
        3
    """
    check_integer("n", n, 1)
    check_integer("num_lines", num_lines, 1)
    modules = [_block_prompts(read_source(path), num_lines) for path in heldout_files()]
    modules = [prompts for prompts in modules if prompts]
    if not modules:
        raise ValueError(f"no module of the library has a block after {num_lines} lines")
    chosen = []
    for index in range(n):
        prompts = modules[index % len(modules)]
        turn = index // len(modules)
        # Start in the middle of the file and walk on: the head of a module is mostly imports.
        chosen.append(prompts[(len(prompts) // 2 + turn) % len(prompts)])
    return chosen


def _block_prompts(text: str, num_lines: int) -> list[str]:
    """Cut `text` after the opening line of each block that has `num_lines` lines before its end."""
    lines = text.splitlines(keepends=True)
    prompts = []
    for row, line in enumerate(lines):
        is_opening = _BLOCK_START.match(line) and line.rstrip().endswith(":")
        if is_opening and row + 1 >= num_lines:
            # No final newline: the tokenizer joins it to the indentation that is still to come.
            prompts.append("".join(lines[row + 1 - num_lines : row + 1]).rstrip())
    return prompts
