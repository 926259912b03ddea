"""A run on disk, batch by batch, that can be gone on with after an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec.evaluation.evaluation import EvaluatedBatch
from specdec.settings import differences

FORMAT = "specdec.evaluation/1"
BEGINNING = json.dumps({"format": FORMAT})[:-1].encode()


def check_writable(path: Path) -> None:
    """Raises `OSError` where a file cannot be written; the path is as it was before."""
    is_new = not path.exists()
    with path.open("ab"):
        pass
    if is_new:
        path.unlink()


class RunFile:
    """JSONL: a line about the run, then a line per finished batch, on disk before the next begins.

    Args:
        path: of the file; made by the first batch.
        about: of the run; its entry `run` must equal that of the file.
    """

    def __init__(self, path: Path, about: dict[str, Any]):
        self.path = path
        self._about = about

    def read(self) -> list[EvaluatedBatch]:
        """The finished batches, none where there is no file. A last line that was cut off by an
        interruption is removed from the file: its batch is done again.

        Raises:
            OSError: the file cannot be written.
            ValueError: the file is of another run; says what differs.
        """
        check_writable(self.path)
        if not self.path.exists():
            return []
        header, lines, whole = read_lines(self.path)
        if header is None:
            begun = self.path.read_bytes()[: len(BEGINNING)]
            if not BEGINNING.startswith(begun):
                raise ValueError(
                    f"{self.path} is no evaluation and would be lost; choose another file"
                )
            self.path.unlink()  # interrupted while its first line was written
            return []
        differing = differences(header["run"], json.loads(json.dumps(self._about["run"])))
        if differing:
            raise ValueError(
                f"{self.path} holds another run; they differ in {', '.join(differing)}; choose "
                "another file"
            )
        if whole < self.path.stat().st_size:
            os.truncate(self.path, whole)
        return read_batches(self.path, lines)

    def append(self, batch: EvaluatedBatch) -> None:
        """Adds a finished batch, and waits until it is on disk."""
        is_new = not self.path.exists()
        with self.path.open("a", encoding="utf-8") as file:
            if is_new:
                file.write(json.dumps({"format": FORMAT, **self._about}) + "\n")
            file.write(json.dumps(batch.to_dict()) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Numbered lines of a JSONL file to which programs that were interrupted have added lines: one
    that was cut off is left out, also where it was ended and others follow.

    Args:
        path: of the file.
    """
    with path.open("rb") as file:  # split at newlines only
        for number, line in enumerate(file, start=1):
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError):
                continue


def read_lines(path: Path) -> tuple[dict | None, list[dict], int]:
    """Header (`None` where not even that is whole), the other whole lines, and their bytes.

    Raises:
        ValueError: another kind of file, or a line in the middle that is no JSON.
    """
    lines, whole = [], 0
    with path.open("rb") as file:  # split at newlines only
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):  # cut off: nothing is written after it
                break
            try:
                lines.append(json.loads(text))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is no JSON: {error}") from None
            whole += len(text)
    if not lines:
        return None, [], 0
    header = lines[0] if isinstance(lines[0], dict) else {}
    if header.get("format") != FORMAT or not isinstance(header.get("run"), dict):
        raise ValueError(
            f"{path} is no evaluation: its first line must hold format {FORMAT!r} and the run"
        )
    return header, lines[1:], whole


def read_batches(path: Path, lines: list[dict]) -> list[EvaluatedBatch]:
    """The batches of the lines after the header.

    Raises:
        ValueError: a line that is no batch, or a batch that comes twice; names the line.
    """
    batches: dict[int, EvaluatedBatch] = {}
    for number, line in enumerate(lines, start=2):
        try:
            batch = EvaluatedBatch.from_dict(line)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number} is no batch of an evaluation ({type(error).__name__}: "
                f"{error})"
            ) from None
        if batch.index in batches:
            raise ValueError(f"{path}, line {number} repeats batch {batch.index}")
        batches[batch.index] = batch
    return list(batches.values())
