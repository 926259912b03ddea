"""Files of JSON lines. They are read by bytes: as text, some characters inside a string would end a
line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdec.atomic import append


def append_lines(path: Path, *contents: Any) -> None:
    """Adds lines, all or none of them, and waits until they are on the disk.

    Raises:
        OSError: they could not be written; the file is as before.
    """
    append(path, b"".join(json.dumps(content).encode() + b"\n" for content in contents))


def read_lines(path: Path, *, only_whole: bool = False) -> Iterator[tuple[int, Any]]:
    """The numbered contents of the lines that are not blank.

    Args:
        path: of the file.
        only_whole: leaves out a last line without its end, which a program that was interrupted
            has not finished.

    Raises:
        ValueError: a line that is no JSON; names it.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if only_whole and not line.endswith(b"\n"):
                return
            if line.strip():
                try:
                    content = json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError) as error:
                    raise ValueError(
                        f"{path}, line {number} is no JSON in UTF-8: {error}"
                    ) from None
                yield number, content


@contextmanager
def naming_line(path: Path, number: int) -> Iterator[None]:
    """Errors about a line's content name the file and the line."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path}, line {number} has no {error.args[0]!r}") from None
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"{path}, line {number} is damaged: {error}") from None
