"""Planted faults: the record of one, ways to plant it into the running package, and test runs with
it, each in a process of its own.
"""

import __future__

import contextlib
import importlib
import inspect
import io
import linecache
import os
import re
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from types import FunctionType

import hypothesis
import pytest

ROOT = Path(__file__).parent.parent
PRELOADED = ["pytest", "transformers.models.llama.modeling_llama", "scipy.stats", "hypothesis"]
"""Imported once, and forked with every run: they take ten times as long as most tests."""


@dataclass(frozen=True)
class Swap:
    """Plants `faulty_of(right)` in the place of a function or method.

    Args:
        where: within `specdec`, as `"samplers.noise:Noise.keep"`.
        faulty_of: makes the faulty one from the right one.
    """

    where: str
    faulty_of: Callable

    def check(self) -> None:
        """Refuses to be planted where the code has changed; cheap, and plants nothing."""
        _find(self.where)

    def __call__(self) -> None:
        owner, name, right = _find(self.where)
        _put(owner, name, right, _as(right, self.faulty_of(_function(right))))


@dataclass(frozen=True)
class Edit:
    """Plants a function or method with one piece of its source exchanged.

    Args:
        where: as in `Swap`.
        old: a piece that occurs once in it; white space makes no difference.
        new: what takes its place.
    """

    where: str
    old: str
    new: str

    def check(self) -> None:
        """As `Swap.check`."""
        self._source()

    def __call__(self) -> None:
        owner, name, right = _find(self.where)
        source, file = self._source(), f"<planted in {self.where}>"
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
        module = importlib.import_module(f"specdec.{self.where.split(':')[0]}")
        space = {}
        flags = __future__.annotations.compiler_flag
        exec(compile(source, file, "exec", flags), vars(module), space)
        made = space[name]
        if isinstance(right, FunctionType) and not (right.__closure__ or made.__closure__):
            for part in ("__code__", "__defaults__", "__kwdefaults__"):  # in tables, too
                setattr(right, part, getattr(made, part))
        else:
            _put(owner, name, right, made)

    def _source(self) -> str:
        """The source of the faulty function."""
        source = textwrap.dedent(inspect.getsource(_function(_find(self.where)[2])))
        tokens = re.findall(r"\w+|[^\w\s]", self.old)
        pattern = r"\s*".join(re.escape(token) for token in tokens)
        if len(re.findall(pattern, source)) != 1:
            message = f"{self.old!r} does not occur once in {self.where}; the code has changed"
            raise ValueError(message)
        return re.sub(pattern, lambda _: self.new, source)


@dataclass(frozen=True)
class Fault:
    """A fault like one that the field has shipped.

    Args:
        name: what is done wrong, in words, and where the field did so, as repository#number where
            it is public.
        caught_by: the test or the file of tests that must fail, as pytest names it within the
            tests' folder.
        plant: changes the package in memory.
    """

    name: str
    caught_by: str
    plant: Swap | Edit

    def check(self) -> None:
        """Refuses a place, a piece of source or a test that is not there; plants nothing."""
        self.plant.check()
        file, *names = self.caught_by.split("::")
        source = (ROOT / "tests" / file).read_text()
        if missing := [
            n for n in names if not re.search(rf"^ *((def|class) {n}\b|{n} = )", source, re.M)
        ]:
            raise ValueError(f"tests/{file} has no {missing[0]}")


def _find(where: str) -> tuple:
    """The owner of a part of the package, its name there, and the part as it is stored."""
    module, path = where.split(":")
    owner = importlib.import_module(f"specdec.{module}")
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name, inspect.getattr_static(owner, name)


def _function(right):
    """What a property, a static or class method or a Triton kernel wraps."""
    for name in ("fget", "func", "__func__", "fn"):
        right = getattr(right, name, right)
    return right


def _as(right, faulty):
    """The faulty function as the same kind of attribute."""
    is_wrapped = isinstance(right, property | cached_property | staticmethod | classmethod)
    return type(right)(faulty) if is_wrapped else faulty


def _put(owner, name: str, right, faulty) -> None:
    """Binds it wherever the package, as far as it is imported, has the right one."""
    if isinstance(faulty, cached_property):
        faulty.__set_name__(owner, name)
    setattr(owner, name, faulty)
    modules = [m for n, m in list(sys.modules.items()) if n.split(".")[0] == "specdec"]
    classes = [c for m in modules for c in vars(m).values() if inspect.isclass(c)]
    for holder in (*modules, *classes):
        for key, value in list(vars(holder).items()):
            if value is right:
                setattr(holder, key, faulty)
            elif isinstance(value, staticmethod) and value.__func__ is right:
                setattr(holder, key, staticmethod(faulty))
            elif type(value) is tuple and any(each is right for each in value):  # commands
                setattr(holder, key, tuple(faulty if each is right else each for each in value))


def workers(count: int) -> ProcessPoolExecutor:
    """Runs each task in a process of its own, so many at a time, where nothing of ours is loaded
    yet.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return ProcessPoolExecutor(count, mp_context=context, max_tasks_per_child=1)


class _Planter:
    """Plants after conftest.py has been read and before any test has."""

    def __init__(self, plant: Callable[[], None] | None):
        self.plant = plant

    def pytest_sessionstart(self):
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]  # nothing is made smaller
        gate = hypothesis.settings.get_profile("gate")
        hypothesis.settings.register_profile("planted", parent=gate, phases=phases)
        hypothesis.settings.load_profile("planted")
        if self.plant is not None:
            self.plant()


def run_tests(index: int | None, *tests: str) -> tuple[int, str]:
    """Pytest's exit status and output up to the first failure; for `workers`.

    Args:
        index: of the fault to plant among `mutants.FAULTS`; `None` plants none.
        tests: as pytest names them within the tests' folder.
    """
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from mutants import FAULTS

    plant = None if index is None else FAULTS[index].plant
    output = io.StringIO()
    arguments = ["-q", "-x", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = int(pytest.main(arguments, plugins=[_Planter(plant)]))
    return status, output.getvalue()
