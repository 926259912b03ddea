"""Files are replaced as a whole: what is read is what was written last, or what was there before.

A file that is opened to be written is empty until it is full again: a full disk, or the end of the
process, in between would lose what it held. So the new content goes to a file beside it, is flushed
to the disk, and takes its name.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

_MOVING = ".specdec-moving"
"""Of new files that take their places one by one."""
_LAST = "config.json"
"""The file without which nobody reads the others. It comes last, and is away before, so that nobody
reads old files by a new one, or new ones by an old one.
"""


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """A file of bytes that takes the place of `path` at the end of the block; none does where the
    block, or the disk, fails. A process that is killed leaves a file `.specdec-....part` behind.

    Args:
        path: of the file. What is no ordinary file, `/dev/stdout` for instance, is written to.

    Raises:
        OSError: the file cannot be written; it is as it was before.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "numbers.txt")
        ...     with replacing(path) as file:
        ...         _ = file.write(b"1 2 3")
        ...     path.read_text()
        '1 2 3'
    """
    path = Path(os.path.realpath(path))  # what a link points to is replaced, not the link
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        with path.open("wb") as file:
            yield file
        return
    part = _beside(path.parent)
    try:
        with part.open("xb") as file:
            if path.exists():
                shutil.copymode(path, part)
            yield file
            _flush(file)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def write_text(path: str | Path, text: str) -> None:
    """Replaces a file by a text in UTF-8, see `replacing`."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def replacing_files(folder: str | Path, *, instead_of: str = "") -> Iterator[Path]:
    """A folder whose files take the places of those in `folder` at the end of the block, when all
    of them are on the disk; none does where the block, or the disk, fails.

    The new files are first renamed together, to the folder `.specdec-moving`, and then one by one,
    while config.json is away: whoever reads in between finds none. Where the process is killed in
    between, `check_whole` says so and the next call moves the remaining files first. Processes that
    end a block at the same time wait for each other, so that the files of one of them are found.

    Args:
        folder: is made if need be; other files in it stay.
        instead_of: a pattern of old files that are removed where they are not replaced.

    Raises:
        OSError: a file cannot be written; all are as they were before. Or, on a file system without
            locks, another process moves its files now, or was killed there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing_files(folder) as new:
        ...         write_text(new / "weights", "1 2 3")
        ...         write_text(new / "config.json", "{}")
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['config.json', 'weights']
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    part = _beside(folder)
    try:
        part.mkdir()
        yield part
        for file in _files(part):
            with file.open("r+b") as written:
                _flush(written)
        with _alone(folder) as is_alone:
            moving = folder / _MOVING
            if is_alone and moving.exists():  # of a process that was killed
                _move(moving, folder)
            try:
                os.rename(part, moving)
            except OSError as error:
                if not moving.exists():
                    raise
                raise OSError(
                    f"nothing was written to {folder}: another process is replacing its files, or "
                    "was killed while it did, and this file system has no locks to tell which. "
                    f"{_by_hand(folder)}, remove that folder, and save again"
                ) from error
            _move(moving, folder, instead_of)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    _flush_folder(folder)


def check_whole(folder: str | Path) -> None:
    """Raises `ValueError` for a folder some of whose files were replaced, and not config.json: the
    process that did it was killed, or is at work.
    """
    folder = Path(folder)
    if (folder / _MOVING).is_dir() and not (folder / _LAST).exists():
        raise ValueError(
            f"the files in {folder} are being replaced, or the process that did it was killed: old "
            f"and new ones are mixed, and there is no {_LAST}. Wait, or save again. "
            f"{_by_hand(folder)}"
        )


def finish_replacing(folder: str | Path) -> None:
    """Gives the files their places that a killed process of `replacing_files` left to be moved; for
    those who look at the old files before they replace them.
    """
    folder = Path(folder)
    if (folder / _MOVING).is_dir():
        with _alone(folder) as is_alone:
            if is_alone and (folder / _MOVING).is_dir():
                _move(folder / _MOVING, folder)


def _by_hand(folder: Path) -> str:
    return (
        f"If no process is saving there, move the files in {folder / _MOVING} to {folder}, {_LAST} "
        "at the end"
    )


def _move(moving: Path, folder: Path, instead_of: str = "") -> None:
    """Gives all files their places; goes on where a call that was killed had ended."""
    if (folder / _LAST).exists():
        if (moving / _LAST).exists():
            (folder / _LAST).unlink()
        else:
            os.rename(folder / _LAST, moving / _LAST)
    files = sorted(_files(moving), key=lambda file: file == moving / _LAST)
    places = [folder / file.relative_to(moving) for file in files]
    for old in folder.glob(instead_of) if instead_of else ():
        if old.is_file() and old not in places:
            old.unlink()
    for file, place in zip(files, places, strict=True):
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place)
    shutil.rmtree(moving)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Waits until no other process is in such a block, or has ended; `False` where the system has
    no locks.
    """
    is_locked = False
    with ExitStack() as stack:
        with suppress(OSError):  # a file system without locks, or without those of folders
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX)
                is_locked = True
        yield is_locked


def append(path: str | Path, content: bytes) -> None:
    """Adds bytes to a file and waits until they are on the disk.

    Raises:
        OSError: they could not be written; the file is as long as before.
    """
    with Path(path).open("ab", buffering=0) as file:
        before = file.tell()
        try:
            view = memoryview(content)
            while view:
                view = view[file.write(view) :]
            _flush(file)
        except BaseException:
            with suppress(OSError):
                os.truncate(path, before)
            raise


def _beside(folder: Path) -> Path:
    """A new name. It says nothing of the file, so that no pattern of files meets it."""
    return folder / f".specdec-{secrets.token_hex(6)}.part"


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """The new names, too, are on the disk; not every system can say so."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
