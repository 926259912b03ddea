"""Figures and tables whose code has changed since they were made, by `made.toml`.

    python docs/figures/made.py                               # lists those
    python docs/figures/made.py NAME ...                      # these alone; fails if one is older
    python docs/figures/made.py --made NAME ... --device "one H200"  # made with the code of HEAD

What decides a figure's numbers is compared: the program in a Python file without comments and
docstrings, every other file (weights, TOML, pages) byte for byte. Where an entry has `texts`, what
`texts.py` finds that the zoo writes is compared in place of the library's program. Fails where a
figure has no entry, an entry no figure, or a commit is not in the history.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MANIFEST = Path(__file__).with_name("made.toml")
PICTURES = (
    "docs/figures/*.png",
    "docs/figures/*.svg",
    "docs/figures/*.json*",
    "benchmarks/figures/*",
)
PAGES = "README.md", "benchmarks/README.md", "docs/*.md"
TABLE = re.compile(r"^(\|.*)\n\|[-:| ]+\n((?:\|.*\n)+)", re.MULTILINE)
MEASURED = re.compile(r"\| *\**\d+\.\d+")
"""The beginning of a cell with a measured number."""
LIBRARY = re.compile(r"specdec/.*\.(py|md)")


def git(*arguments: str) -> str | None:
    """What a command of git prints; None where it fails, or there is no git."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def has_history() -> bool:
    """Whether this is a clone with all its commits."""
    return git("rev-parse", "--is-shallow-repository") == "false"


def figures(*, at_least: float = 0.5) -> set[str]:
    """The files of figures, and `page: first line` of each table where at least this share of the
    rows has a number with decimals.
    """
    found = {str(path.relative_to(ROOT)) for glob in PICTURES for path in ROOT.glob(glob)}
    for page in (path for glob in PAGES for path in ROOT.glob(glob)):
        for header, body in TABLE.findall(page.read_text(encoding="utf-8")):
            rows = body.splitlines()
            if sum(bool(MEASURED.search(row)) for row in rows) >= at_least * len(rows):
                cells = ", ".join(cell.strip() for cell in header.strip("|").split("|"))
                found.add(f"{page.relative_to(ROOT)}: {cells.strip(' ,')}")
    return found


def read() -> dict[str, dict]:
    """The entries, with all paths of their code."""
    entries = tomllib.loads(MANIFEST.read_text(encoding="utf-8"))
    named = entries.pop("code")
    for entry in entries.values():
        entry["code"] = [path for name in entry["code"] for path in named.get(name, [name])]
    return entries


def faults(entries: dict[str, dict]) -> list[str]:
    """What is wrong with the entries, in words."""
    lacking, known = figures() - entries.keys(), figures(at_least=0)
    found = [f"{name} has no entry in docs/figures/made.toml" for name in sorted(lacking)]
    found += [f"{name} has an entry, and is not there" for name in sorted(entries.keys() - known)]
    is_whole, is_ours = has_history(), cache(_is_ours)
    for name, entry in entries.items():
        for key in {"commit", "device", "command", "code"} - entry.keys():
            found.append(f"{name} has no {key}")
        gone = [path for path in entry.get("code", []) if not (ROOT / path).exists()]
        found += [f"{name}: {path}, of its code, does not exist" for path in gone]
        if is_whole and not is_ours(made := entry.get("commit", "")):
            found.append(f"{name}: commit {made!r} is not in the history")
    return found


def _is_ours(commit: str) -> bool:
    """Whether a commit is in the history of HEAD."""
    return git("merge-base", "--is-ancestor", commit, "HEAD") is not None


def stale(entries: dict[str, dict]) -> dict[str, list[str]]:
    """The files of each figure that say something else since it was made, where there are any.

    A new file counts by those that import it.
    """
    changed = {}
    for name, entry in entries.items():
        since = "diff", "--name-only", "--no-renames", "--diff-filter=MD", entry["commit"], "HEAD"
        files = (git(*since, "--", *entry["code"]) or "").splitlines()
        files = [file for file in files if _says(entry["commit"], file) != _says("HEAD", file)]
        if "texts" in entry and any(map(LIBRARY.fullmatch, files)):
            files = [file for file in files if not LIBRARY.fullmatch(file)]
            files += ["what the zoo writes"] * (entry["texts"] != texts())
        changed[name] = files
    return {name: files for name, files in changed.items() if files}


@cache
def texts() -> str:
    """What `texts.py` prints, with the library beside it."""
    command = [sys.executable, Path(__file__).with_name("texts.py")]
    where = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "cwd": ROOT}
    return subprocess.run(
        command, capture_output=True, text=True, check=True, **where
    ).stdout.strip()


@cache
def _says(commit: str, file: str) -> str | None:
    """What a file of a commit says to a machine; None where there is no such file."""
    if not file.endswith(".py"):
        return git("rev-parse", "--verify", "-q", f"{commit}:{file}")
    if (text := git("show", f"{commit}:{file}")) is None:
        return None
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):  # docstrings, of modules and values as well
            if isinstance(body := getattr(node, field, None), list):
                kept = [one for one in body if not _is_text(one)]
                setattr(node, field, kept)
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    is_value = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_value and isinstance(node.value.value, str)


def set_made(name: str, entry: dict, device: str | None) -> None:
    """Writes the commit of HEAD into an entry."""
    if changed := git("status", "--porcelain", "--", *entry["code"]):
        sys.exit(f"error: commit the code of {name} first, then make it:\n{changed}")
    text = MANIFEST.read_text(encoding="utf-8")
    start = text.index(f'["{name}"]\n')
    end = start + len(text[start:].split("\n[", 1)[0])
    values = {"commit": git("rev-parse", "--short=7", "HEAD"), "device": device or entry["device"]}
    values |= {"texts": texts()} if "texts" in entry else {}
    own = text[start:end]
    for key, value in values.items():
        own = re.sub(rf"^{key} = .*$", f'{key} = "{value}"', own, flags=re.MULTILINE)
    MANIFEST.write_text(text[:start] + own + text[end:], encoding="utf-8")


def main() -> int:
    """As on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of entries; default: all")
    parser.add_argument("--made", action="store_true", help="they were made just now")
    parser.add_argument("--device", help="that they were made on, if another than before")
    arguments = parser.parse_args()
    entries = read()
    if unknown := [name for name in arguments.names if name not in entries]:
        sys.exit(f"error: made.toml has no entry {unknown[0]!r}; write one first")
    for name in arguments.names if arguments.made else ():
        set_made(name, entries[name], arguments.device)
    entries = read()
    if wrong := faults(entries):
        print(*wrong, sep="\n")
        return 1
    if not has_history():
        print("figures: this clone has no history, so it is not known whose code has changed")
        return 0
    entries = {name: entries[name] for name in arguments.names or entries}
    older = stale(entries)
    print(f"{len(older)} of {len(entries)} figures and tables are older than their code:")
    for name, files in older.items():
        commit, device, command = (entries[name][key] for key in ("commit", "device", "command"))
        first = f"{files[0]} and {len(files) - 1} more" if files[1:] else files[0]
        print(f"{name}\n    {commit}, {device}: {command}\n    changed: {first}")
    return int(bool(arguments.names and older))


if __name__ == "__main__":
    sys.exit(main())
