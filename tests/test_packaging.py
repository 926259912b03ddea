"""A wheel and an sdist, built from what git tracks, contain every file of the package."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

import specdec

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IGNORED = [
    line.strip("/")
    for line in (ROOT / ".gitignore").read_text().splitlines()
    if line.strip() and not line.startswith("#")
]
BUILD = """
import importlib, sys
name, packages = sys.argv[1:]
backend = importlib.import_module(name)
backend.build_wheel(packages)
backend.build_sdist(packages)
"""
"""Reads its arguments first, since the backend overwrites `sys.argv`."""


def is_ignored(file: Path, patterns: list[str]) -> bool:
    """Whether a pattern matches the file or a folder that it is in, by its name or its path."""
    steps = [file, *file.parents]
    names = [name for step in steps for name in (step.name, step.as_posix())]
    return any(fnmatch(name, pattern) for name in names for pattern in patterns)


def files_of_the_package() -> set[str]:
    """What `specdec/` holds on this disk, tracked or not; no caches and no hidden files."""
    files = (file.relative_to(ROOT) for file in (ROOT / "specdec").rglob("*") if file.is_file())
    return {file.as_posix() for file in files if not is_ignored(file, ["__pycache__", ".?*"])}


def tracked_files() -> list[Path]:
    """What a clone would hold; without git, all files but those that `.gitignore` names."""
    command = ["git", "ls-files", "-z"]
    try:
        listed = subprocess.check_output(command, cwd=ROOT, text=True, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        listed = ""
    if listed:  # nothing is listed in an untracked folder within another clone
        files = [Path(name) for name in listed.strip("\0").split("\0")]
        return [file for file in files if os.path.lexists(ROOT / file)]
    files = (file.relative_to(ROOT) for file in ROOT.rglob("*") if file.is_file())
    return [file for file in files if not is_ignored(file, [*IGNORED, ".git"])]


def copy_tracked(copy: Path) -> None:
    """Copies into a new folder, since a build writes beside its sources and reads what it wrote."""
    for file in tracked_files():
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, copy / file, follow_symlinks=False)


def build(copy: Path, packages: Path) -> tuple[set[str], set[str]]:
    """Files in the wheel and in the sdist of a copy; the backend alone, hence without network."""
    backend = PROJECT["build-system"]["build-backend"]
    command = [sys.executable, "-c", BUILD, backend, str(packages)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(packages.glob("*.whl"))) as wheel:
        in_wheel = set(wheel.namelist())
    with tarfile.open(next(packages.glob("*.tar.gz"))) as sdist:
        in_sdist = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    return in_wheel, in_sdist


@pytest.mark.swept
def test_a_wheel_and_an_sdist_contain_every_file_of_the_package(tmp_path):
    copy_tracked(tmp_path / "copy")
    in_wheel, in_sdist = build(tmp_path / "copy", tmp_path)
    project = PROJECT["project"]
    needed = {"pyproject.toml", project["readme"], *project["license-files"]}
    information = f"{project['name'].replace('-', '_')}-{specdec.__version__}.dist-info/"
    assert {name for name in in_wheel if not name.startswith(information)} == files_of_the_package()
    assert (files_of_the_package() | needed) - in_sdist == set()
    assert not {name for name in in_sdist if name.startswith("tests/")}  # all of them, or none


def test_a_folder_and_a_file_that_are_left_out_are_noticed(tmp_path):
    """The negative control: exactly these are missing, in both."""
    copy_tracked(tmp_path / "copy")
    settings = tmp_path / "copy" / "pyproject.toml"
    find, data = 'include = ["specdec*"]', '    "lab/trace/page.html",\n'
    text = settings.read_text()
    assert text.count(find) == text.count(data) == 1
    text = text.replace(find, f'{find}\nexclude = ["specdec.targets*"]').replace(data, "")
    settings.write_text(text)
    for weights in (tmp_path / "copy").rglob("*.safetensors"):
        weights.write_bytes(b"")  # only names are compared, and compression takes long
    files = files_of_the_package()
    left_out = {name for name in files if name.startswith("specdec/targets/")}
    assert left_out
    for packed in build(tmp_path / "copy", tmp_path):
        assert files - packed == left_out | {"specdec/lab/trace/page.html"}


def test_no_pattern_of_gitignore_swallows_a_file_of_the_package():
    files = [Path(name) for name in files_of_the_package()]
    assert [file for file in files if is_ignored(file, IGNORED)] == []
    for pattern in ("targets", "specdec/targets", "**/targets", "*.safetensors"):
        assert any(is_ignored(file, [pattern]) for file in files)
