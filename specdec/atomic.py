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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


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
def replacing_files(folder: str | Path, *, last: str = "config.json") -> Iterator[Path]:
    """A folder whose files take the places of those in `folder` at the end of the block, when all
    of them are on the disk; none does where the block, or the disk, fails.

    Args:
        folder: is made if need be; other files in it stay.
        last: the file without which nobody reads the others. Where it is replaced it is away while
            the others change, so that nobody reads old ones by a new one.

    Raises:
        OSError: a file cannot be written; all are as they were before.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    part = _beside(folder)
    try:
        part.mkdir()
        yield part
        files = sorted((f for f in part.rglob("*") if f.is_file()), key=lambda f: f.name == last)
        for file in files:
            with file.open("r+b") as written:
                _flush(written)
        if (part / last).exists():
            (folder / last).unlink(missing_ok=True)
        for file in files:
            place = folder / file.relative_to(part)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, place)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    _flush_folder(folder)


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
