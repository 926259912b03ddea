"""The pages that a user reads, and the fenced blocks in them."""

import re
from pathlib import Path

import specdec

ROOT = Path(specdec.__file__).parents[1]
FOUND = [
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "specdec/**/*.md", "tests/*.md")
    for path in ROOT.glob(pattern)
]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(FOUND)}
"""Text by path."""


def blocks(page: str, language: str = "python") -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], flags=re.MULTILINE | re.DOTALL)


def languages(page: str) -> list[str]:
    """That the fenced blocks of a page name; "" where one names none."""
    return re.findall(r"^ *(?:```|~~~)(.*)$", PAGES[page], flags=re.MULTILINE)[::2]
