"""Pieces of work that any number of processes share, on any file system, without locks.

A process takes a piece by a marker: a file that one process alone can create, and that says whose
it is. A thread updates its time as long as the process runs. The piece of a dead process is taken
over by a further marker, with a `+` more in its name, which again one process alone can create.
"""

from __future__ import annotations

import hashlib
import os
import platform
import random
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

BEAT_S = 10.0
PATIENCE_S = 120.0
"""A process is dead whose marker has not changed for so long on the clock of the process that
looks: no two clocks are compared. Network file systems may show times that are a minute old.
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
        self.name = f"{_place()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._held = self._card = self.folder / self.name  # the marker of the last piece
        self._seen: dict[str, tuple[Any, float]] = {}

    @contextmanager
    def joined(self) -> Iterator[None]:
        """This process is one of those that work. After an error its last piece is free again.

        Raises:
            OSError: the folder cannot be made.
        """
        self.enter()
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
            with suppress(OSError):  # where others have removed the folder, or have files in it
                self._card.unlink()
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
                last, marker = None, self.folder / name
                while marker.name in marked:
                    last, marker = marker, marker.with_name(f"{marker.name}+")
                is_free = last is None or (abandoned and self._is_dead(last))
                if is_free and self._mark(marker):
                    self._held = marker
                    return name
        return None

    def release(self) -> None:
        """Frees the piece that was taken last, of which markers of dead processes go first."""
        if (held := self._held) != self._card:
            for end in range(len(held.name.rstrip("+")), len(held.name) + 1):
                (self.folder / held.name[:end]).unlink(missing_ok=True)

    def enter(self) -> None:
        """Makes the folder with a card of this process, whatever others remove meanwhile."""
        while not self._card.exists():
            with suppress(FileExistsError):
                self.folder.mkdir()
            with suppress(FileNotFoundError):
                self._fill(self._card)

    def _mark(self, marker: Path) -> bool:
        """Makes a marker, which is a link to the card and so never without its content; whether no
        other process was first.

        Raises:
            FileNotFoundError: the folder was removed, even if others have made it anew.
        """
        try:
            os.link(self._card, marker)
        except FileExistsError:  # by a lost message of a network, this process's own
            return marker.samefile(self._card)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without links, or without so many
            try:
                self._fill(marker)
            except FileExistsError:
                return False
            if not self._card.exists():
                marker.unlink()
                raise FileNotFoundError(self._card) from None
        return True

    def _fill(self, new: Path) -> None:
        with new.open("x") as file:
            file.write(self.name)

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT_S):
            with suppress(OSError):
                os.utime(self._held)

    def _is_dead(self, marker: Path) -> bool:
        """Whether the process of a marker has ended: known at once of those of this machine."""
        with suppress(FileNotFoundError):
            state = owner, _ = marker.read_text(), marker.stat().st_mtime_ns
            place, *rest = owner.rsplit("-", 2)  # empty where it died before it wrote
            if place == _place() and not _is_running(int(rest[0])):
                return True
            now = time.monotonic()
            before, since = self._seen.setdefault(marker.name, (state, now))
            if before != state:
                self._seen[marker.name] = state, now
            return before == state and now - since > PATIENCE_S
        return False


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
