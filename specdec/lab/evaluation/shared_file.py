"""A file that any number of processes write together, on any file system, without locks.

Until `run.jsonl` is whole, a folder `.run.jsonl.parts` stands beside it, with the markers of all
processes (`markers.py`), and a part for each, to which it adds lines. The process that finds all of
the work done writes the whole file and removes the folder.

Seeds decide what a piece of work gives: of a piece that was done twice readers keep one, and a
wrong guess about another process costs time only.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from specdec.atomic import replacing
from specdec.jsonl import append_lines, naming_line, read_lines
from specdec.lab.evaluation import markers
from specdec.lab.evaluation.markers import Markers
from specdec.processes import Team
from specdec.settings import differences

L, T = TypeVar("L"), TypeVar("T")


class SharedFile(Markers, ABC, Generic[L]):
    """JSONL: lines with keys. A part begins with a line about the run, which is the same in all.

    Args:
        path: of the file, which is there when it is whole.
        about: of the run; its entry `run` must be equal in all processes. `None` for readers.
        team: the processes that do all work together; the first one reads and writes.

    Attributes:
        lines: that are known by now, by their keys in order.
    """

    FORMAT: str

    def __init__(
        self, path: str | Path, about: Mapping[str, Any] | None = None, team: Team | None = None
    ):
        super().__init__(path)
        self.part = self.folder / f"{self.name}.jsonl"
        self.about: dict[str, Any] | None = about and json.loads(json.dumps(about))
        self.lines: dict[Any, L] = {}
        self._team = team or Team()
        self._known: dict[Path, tuple[Any, dict[str, Any] | None, dict[Any, L]]] = {}

    @abstractmethod
    def _parsed(self, content: dict[str, Any]) -> tuple[Any, L]:
        """A line's key, and the line."""

    @abstractmethod
    def _saved(self, line: L) -> dict[str, Any]:
        """A line, as JSON holds it."""

    @property
    def files(self) -> list[Path]:
        """The parts, and then the whole file, which is there before the parts go."""
        names = []
        with suppress(FileNotFoundError):
            names = sorted(os.listdir(self.folder))
        return [*(self.folder / name for name in names if name.endswith(".jsonl")), self.path]

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Reads what is there; see `Markers`."""
        with ExitStack() as stack:
            join = super().joined()
            self._from_first(lambda: (stack.enter_context(join), self.refresh()))
            yield

    def pieces(
        self,
        wanted: Callable[[], Iterable[str]],
        is_settled: Callable[[], bool],
        *,
        wait: bool = True,
    ) -> Iterator[str]:
        """Pieces of work that this process is to do, one after the other: what is free, then what
        dead processes have left.

        Args:
            wanted: names of what is not done, as far as `lines` says.
            is_settled: whether nothing is left, see `settle`.
            wait: until it is.
        """

        def claimed() -> str | None:
            if (name := self.take(wanted())) is None:
                self.enter()  # others may have removed the folder: read after that
                self.refresh()
                name = self.take(wanted(), abandoned=True)
            return name

        while True:
            if (name := self._from_first(claimed)) is not None:
                yield name
            elif is_settled() or not wait:
                return
            else:
                time.sleep(markers.POLL_S)

    def refresh(self) -> dict[Any, L]:
        """All lines that are there by now.

        Raises:
            ValueError: a file is of another run, or a line is damaged; says what.
        """
        found: dict[Any, L] = {}
        for file in self.files:
            about, lines = self._read(file)
            self.about = self.about or about
            if about and (differing := differences(about["run"], self.about["run"])):
                raise ValueError(
                    f"{file} holds another run; they differ in {', '.join(differing)}; choose "
                    "another file"
                )
            found |= lines
        self.lines = dict(sorted(found.items()))
        return self.lines

    def append(self, *lines: L) -> None:
        """Adds lines to the part of this process, and waits until they are on the disk.

        Raises:
            OSError: they could not be written; the part holds the lines before them.
        """
        contents = [self._saved(line) for line in lines]
        self.lines |= dict(map(self._parsed, contents))
        if self._team.is_writer:
            self.enter()
            is_begun = self.part.exists() and self.part.stat().st_size > 0
            with suppress(FileNotFoundError):  # the folder was removed: others have done it, too
                append_lines(self.part, *[self._header()][is_begun:], *contents)

    def settle(self, keys: Collection[Any]) -> bool:
        """Whether the file is whole; makes it so where all lines are there.

        Args:
            keys: of all lines.
        """

        def settled() -> bool:
            self.refresh()
            if not set(keys) <= self._read(self.path)[1].keys():
                if not set(keys) <= self.lines.keys():
                    return False
                self.enter()  # this may be after `joined`
                if self.take(["whole"], abandoned=True) is None:
                    return False
                self._write([self.lines[key] for key in keys], self._header())
            gone = self.folder.with_name(f".specdec-{secrets.token_hex(6)}.part")
            with suppress(OSError):  # all of it at once: who sees a part of it would go on
                self.folder.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
            return True

        return self._from_first(settled)

    def fail(self, error: Exception) -> None:
        """Leaves what is missing to other processes."""

    def _from_first(self, work: Callable[[], T]) -> T:
        """What `work` returns in the first process; all have the lines that it has read."""
        before = self.lines
        result, read = self._team.from_first(
            lambda: (work(), None if self.lines is before else self.lines)
        )
        self.lines = before if read is None else read
        return result

    def _write(self, lines: Iterable[L], *header: dict[str, Any]) -> None:
        with replacing(self.path) as file:
            for content in (*header, *map(self._saved, lines)):
                file.write(json.dumps(content).encode() + b"\n")

    def _header(self) -> dict[str, Any]:
        return {"format": self.FORMAT, **(self.about or {})}

    def _about(self, file: Path, lines: Iterator[tuple[int, Any]]) -> dict[str, Any] | None:
        """What the first line says; `None` where a killed process has not finished it."""
        _, header = next(lines, (1, None))
        begun = json.dumps({"format": self.FORMAT})[:-1].encode()
        if header is None and begun.startswith(file.read_bytes()[: len(begun)]):
            return None
        is_run = isinstance(header, dict) and header.pop("format", None) == self.FORMAT
        if not is_run or not isinstance(header.get("run"), dict):
            lost = " and would be lost; choose another file" if header is None else ""
            raise ValueError(
                f"{file} is no evaluation{lost}: its first line must hold format {self.FORMAT!r} "
                "and the run"
            )
        return header

    def _read(self, file: Path) -> tuple[dict[str, Any] | None, dict[Any, L]]:
        """A file's first line, and the whole lines after it; read again where it has changed."""
        with suppress(FileNotFoundError):  # or the whole file has taken its place
            state = (found := file.stat()).st_ino, found.st_size
            if state[1] and state != self._known.get(file, (None,))[0]:
                contents, lines = read_lines(file, only_whole=True), {}
                about = self._about(file, contents)
                for number, content in contents:
                    with naming_line(file, number):
                        key, line = self._parsed(content)
                        if lines.setdefault(key, line) is not line:
                            raise ValueError(f"{self._called(key)} comes twice")
                self._known[file] = state, about, lines
            if state[1]:
                return self._known[file][1:]
        return None, {}

    def _called(self, key: Any) -> str:
        return f"batch {key}"
