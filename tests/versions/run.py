"""Runs a short suite on other versions of transformers than the pinned one.

    python tests/versions/run.py                 # the oldest that pyproject.toml admits, the newest
    python tests/versions/run.py 5.20.1 --write  # and write the table of docs/types.md
    python tests/versions/run.py 5.17.0 --whole  # the whole suite in place of the short one

A version goes into a folder of its own, before this environment's on the path; all other packages
are the pinned ones, as far as the version takes them. One that is newer than all in
`specdec.hf.versions.TRIED` is tried and reported, and does not fail the run.
"""

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.version import Version

from specdec.hf.versions import TRIED

ROOT = Path(__file__).parents[2]
SUITE = Path(__file__).parent / "suite.txt"
TABLE = re.compile(r"(?<=<!-- versions -->\n).*?(?=<!-- /versions -->)", re.DOTALL)
FREE = ("transformers", "huggingface-hub", "tokenizers")
"""Packages that a version of transformers chooses."""


def oldest() -> str:
    """That `pyproject.toml` admits."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = (re.match(r"transformers>=([\d.]+)", d) for d in project["dependencies"])
    version = next(bound[1] for bound in bounds if bound)
    return ".".join((*version.split("."), "0")[:3])


def newest() -> str:
    """That the index has today."""
    command = [sys.executable, "-m", "pip", "index", "versions", "transformers"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.match(r"transformers \(([\d.]+)\)", listed)[1]


def install(version: str, folder: Path) -> None:
    """Into a folder."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [pin for pin in pins if not pin.startswith(FREE)]
    (folder / "pins.txt").write_text("\n".join(kept))
    options = ["-q", "--target", folder, "-c", folder / "pins.txt", f"transformers=={version}"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options], check=True)


def run(version: str, is_whole: bool) -> tuple[bool, str]:
    """Whether the suite passed, and what its last line counts."""
    with tempfile.TemporaryDirectory() as name:
        install(version, Path(name))
        paths = [name, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        loaded = [sys.executable, "-c", "import transformers; print(transformers.__version__)"]
        found = subprocess.check_output(loaded, env=environment, text=True).strip()
        assert found == version, f"{found} is loaded in the place of {version}"
        command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile"]
        command += [] if is_whole else [f"@{SUITE}"]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr[-2000:], flush=True)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)\b", done.stdout[-400:])
    return done.returncode == 0, ", ".join(counts) or f"exit code {done.returncode}"


def write(results: dict[str, str], suite: str) -> None:
    """Into the table of `docs/types.md`, beside what is there of other versions."""
    page = ROOT / "docs" / "types.md"
    text, today = page.read_text(), datetime.date.today().isoformat()
    rows = dict(re.findall(r"^\| ([\d.]+) \|(.*)\|$", TABLE.search(text)[0], re.MULTILINE))
    rows |= {version: f" {suite} | {said} | {today} " for version, said in results.items()}
    lines = [f"| {v} |{rows[v]}|\n" for v in sorted(rows, key=Version, reverse=True)]
    head = "\n| transformers | what was run | result | date |\n|---|---|---|---|\n"
    page.write_text(TABLE.sub(lambda _: head + "".join(lines) + "\n", text))


def main() -> int:
    """As on the command line; 1 where a version that was tried before fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", help="default: the oldest and the newest")
    parser.add_argument("--whole", action="store_true", help="the whole suite")
    parser.add_argument("--write", action="store_true", help="the table of docs/types.md")
    arguments = parser.parse_args()
    results, lines, is_green = {}, [], True
    for version in dict.fromkeys(arguments.versions or [oldest(), newest()]):
        passed, results[version] = run(version, arguments.whole)
        is_new = Version(version) > Version(TRIED[1])
        is_green &= passed or is_new
        remark = f" (newer than {TRIED[1]}, the newest tried: no failure of the run)"
        lines.append(f"transformers {version}: {results[version]}{remark if is_new else ''}")
    if arguments.write:
        write(results, "whole suite" if arguments.whole else "short suite")
    print("\n".join(lines))
    return 0 if is_green else 1


if __name__ == "__main__":
    sys.exit(main())
