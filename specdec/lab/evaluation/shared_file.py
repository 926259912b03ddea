"""A file that any number of processes write together, on any file system, without locks.

Until `run.jsonl` is whole, a folder `.run.jsonl.parts` stands beside it. A process adds lines to a
part of its own there, and takes a piece of work by a marker: a file that one process alone can
create, and that names its part. A thread touches the part as long as the process runs. The process
that finds all of the work done writes the whole file and removes the folder.

Seeds decide what a piece of work gives: of a piece that was done twice readers keep one, and a
wrong guess about another process costs time only.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import secrets
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from specdec.atomic import replacing
from specdec.jsonl import append_lines, naming_line, read_lines
from specdec.processes import Team
from specdec.settings import differences

L = TypeVar("L")
BEAT_S = 10.0
PATIENCE_S = 120.0
"""A process is dead whose part has not changed for so long on the clock of the process that looks:
no two clocks are compared. Network file systems may show times that are a minute old.
"""
POLL_S = 0.5


class Markers:
    """Pieces of work that processes take, each marked by a file in a folder.

    Args:
        path: of what is worked at; the folder stands beside it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.folder = self.path.parent / f".{self.path.name}.parts"
        self.part = self.folder / f"{_place()}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        self._held = self.part  # the marker of the last piece
        self._seen: dict[str, tuple[Any, float]] = {}

    @contextmanager
    def joined(self) -> Iterator[None]:
        """This process is one of those that work. After an error its last piece is free again.

        Raises:
            OSError: the folder cannot be made.
        """
        self.touch()
        ended = threading.Event()
        beat = threading.Thread(target=self._beat, args=(ended,), daemon=True)
        beat.start()
        try:
            yield
        except BaseException:
            self.release()
            raise
        finally:
            ended.set()
            beat.join()
            with suppress(OSError):
                if not self.part.stat().st_size:
                    self.part.unlink()
            with suppress(OSError):  # where others have files in it
                self.folder.rmdir()

    def take(self, names: Iterable[str], *, abandoned: bool = False) -> str | None:
        """Marks the first of some pieces that is free; `None` where others have marked all.

        Args:
            names: of the pieces, as names of files.
            abandoned: a piece of a process that has ended is free, too.
        """
        with suppress(FileNotFoundError):  # all is done, and the folder was removed
            marked = set(os.listdir(self.folder))
            for name in names:
                marker = self.folder / name
                if name in marked:
                    if not (abandoned and self._is_dead(marker)):
                        continue
                    marker.unlink(missing_ok=True)
                with suppress(FileExistsError), marker.open("x") as file:
                    file.write(self.part.stem)
                    if not self.part.exists():  # it was, and others have made it anew
                        marker.unlink()
                        return None
                    self._held = marker
                    return name
        return None

    def release(self) -> None:
        """Frees the piece that was taken last."""
        if self._held != self.part:
            self._held.unlink(missing_ok=True)

    def touch(self) -> None:
        """Makes the part of this process, whatever others make and remove meanwhile."""
        while not self.part.exists():
            with suppress(FileExistsError):
                self.folder.mkdir()
            with suppress(FileNotFoundError):
                self.part.touch()

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT_S):
            with suppress(OSError):
                os.utime(self.part)

    def _is_dead(self, marker: Path) -> bool:
        """Whether the process of a marker has ended: known at once of those of this machine."""
        with suppress(FileNotFoundError):
            owner, state = marker.read_text(), None
            place, *rest = owner.rsplit("-", 2)  # empty where it died before it wrote
            if place == _place() and not _is_running(int(rest[0])):
                return True
            with suppress(FileNotFoundError):
                found = (self.folder / f"{owner}.jsonl" if owner else marker).stat()
                state = (found.st_mtime_ns, found.st_size)
            now, watched = time.monotonic(), owner or marker.name
            before, since = self._seen.setdefault(watched, (state, now))
            if before != state:
                self._seen[watched] = state, now
            return before == state and now - since > PATIENCE_S
        return False


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

            def begin() -> dict[Any, L]:
                self.refresh()  # raises an error for files of another run
                stack.enter_context(super(SharedFile, self).joined())
                return self.refresh()

            self.lines = self._team.from_first(begin)
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

        def claimed() -> tuple[str | None, dict[Any, L] | None]:
            if (name := self.take(wanted())) is not None:
                return name, None
            self.refresh()
            return self.take(wanted(), abandoned=True), self.lines

        while True:
            name, lines = self._team.from_first(claimed)
            self.lines = self.lines if lines is None else lines
            if name is not None:
                yield name
            elif is_settled() or not wait:
                return
            else:
                time.sleep(POLL_S)
                self.lines = self._team.from_first(self._rejoined)

    def _rejoined(self) -> dict[Any, L]:
        """Reads after its part is there again, where another process has removed the folder."""
        self.touch()
        return self.refresh()

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
            self.touch()
            with suppress(FileNotFoundError):  # at this moment: others have done it, too
                header = [self._header()][: not self.part.stat().st_size]
                append_lines(self.part, *header, *contents)

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
                self.touch()  # an empty part is gone after `joined`
                if self.take(["whole"], abandoned=True) is None:
                    return False
                self._write([self.lines[key] for key in keys], self._header())
            gone = self.folder.with_name(f".specdec-{secrets.token_hex(6)}.part")
            with suppress(OSError):  # all of it at once: who sees a part of it would go on
                self.folder.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
            return True

        is_whole, self.lines = self._team.from_first(lambda: (settled(), self.lines))
        return is_whole

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


@contextmanager
def alone(path: str | Path) -> Iterator[None]:
    """Waits until no other process is in such a block with the same path.

    Args:
        path: names what is used; only a hidden folder beside it is made.
    """
    markers = Markers(path)
    with markers.joined():
        while markers.take(["held"], abandoned=True) is None:
            time.sleep(POLL_S * random.random())
        try:
            yield
        finally:
            markers.release()


@lru_cache(1)
def _place() -> str:
    """Where a process id means one process: a machine since it started, and a container on it."""
    parts = [platform.node()]
    with suppress(OSError):  # elsewhere than on Linux
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return f"{platform.node()}-{hashlib.sha256(''.join(parts).encode()).hexdigest()[:8]}"


def _is_running(pid: int) -> bool:
    """Whether there is such a process here; on Windows this cannot be asked without harm."""
    if os.name == "posix":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's
            pass
    return True
