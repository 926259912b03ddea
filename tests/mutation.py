"""Planted bugs: the record of one, and runs of a copied project that has it."""

import compileall
import contextlib
import io
import os
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ADDED = """

import os  # from here on added by mutation.py

import specdec

if not specdec.__file__.startswith(os.getcwd() + os.sep):
    raise RuntimeError(f"{specdec.__file__} is tested instead of the copy")
hypothesis.settings.register_profile(
    "mutants", parent=hypothesis.settings.get_profile("gate"), phases=[hypothesis.Phase.generate]
)
hypothesis.settings.load_profile("mutants")
"""
"""Closes the copied conftest.py: an exception there is pytest's exit status 4, and no failure is
made smaller.
"""

PRELOADED = ["pytest", "transformers.models.llama.modeling_llama", "scipy.stats", "hypothesis"]
"""Imported once, and forked with every run: they take ten times as long as most tests."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A bug like one that the field has shipped, planted by replacing one piece of source.

    Args:
        name: what the mutant does wrong, in words.
        source: where the field did so: public issues, and their rows in the project's catalogue.
        file: of the package.
        old: a piece of its source that occurs once.
        new: what takes its place.
        caught_by: the test that must fail, as pytest names it within the tests' folder.
    """

    name: str
    source: str
    file: str
    old: str
    new: str
    caught_by: str

    def apply(self, source: str) -> str:
        """The source of `file` with the bug in it.

        Raises:
            ValueError: the piece to replace does not occur exactly once.
        """
        if source.count(self.old) != 1:
            raise ValueError(
                f"mutant {self.name!r}: expected its old source once in {self.file}, found it "
                f"{source.count(self.old)} times; the code has changed, so write the mutant anew"
            )
        return source.replace(self.old, self.new)


def copy_project(folder: Path) -> Path:
    """Copies package and tests to a folder; the zoo's weights, which are large, are linked."""
    package = ROOT / "specdec"
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        package, folder / "specdec", ignore=shutil.ignore_patterns("__pycache__", "weights")
    )
    (folder / "specdec/zoo/weights").symlink_to(package / "zoo/weights")
    shutil.copy(ROOT / "pyproject.toml", folder)
    with (folder / "tests/conftest.py").open("a") as conftest:
        conftest.write(ADDED)
    compileall.compile_dir(folder / "specdec", quiet=1)  # once for all mutants
    return folder


def workers(count: int) -> ProcessPoolExecutor:
    """Runs each task in a process of its own, so many at a time, where nothing of ours is loaded
    yet.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return ProcessPoolExecutor(count, mp_context=context, max_tasks_per_child=1)


def run_tests(project: Path, *tests: str) -> tuple[int, str]:
    """Pytest's exit status and output in a copied project, up to the first failure; for `workers`.

    Args:
        project: from `copy_project`.
        tests: as pytest names them within the tests' folder.
    """
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = _pytest(project, "-x", *(f"tests/{test}" for test in tests))
    return status, output.getvalue()


def run_planted(project: Path, mutant: Mutant) -> tuple[int, str]:
    """As `run_tests`, of the test that is to catch a mutant, in a copy of a copied project."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "planted"
        shutil.copytree(project, copy, symlinks=True)
        file = copy / "specdec" / mutant.file
        file.write_text(mutant.apply(file.read_text()))
        return run_tests(copy, mutant.caught_by)


def collect_tests(project: Path, *files: str) -> list[str]:
    """Names of the ordinary tests in files of the tests' folder, as `Mutant.caught_by` gives them;
    for `workers`.
    """
    names = []

    class Collector:
        def pytest_collection_finish(self, session):
            names.extend(item.nodeid.removeprefix("tests/") for item in session.items)

    with contextlib.redirect_stdout(io.StringIO()):
        _pytest(project, "--collect-only", *(f"tests/{f}" for f in files), plugins=[Collector()])
    return names


def _pytest(project: Path, *arguments: str, plugins: list | None = None) -> int:
    """Runs pytest in a project, which is where `import specdec` looks first."""
    os.chdir(project)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(project))
    return int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=plugins))
