"""A run on disk, batch by batch, that can be gone on with after an interruption."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from specdec.evaluation.evaluation import EvaluatedBatch

FORMAT = "specdec.evaluation/1"
BEGINNING = json.dumps({"format": FORMAT})[:-1].encode()


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
            ValueError: the file is of another run; says what differs.
        """
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
        theirs, ours = header["run"], json.loads(json.dumps(self._about["run"]))
        differing = sorted(n for n in theirs.keys() | ours.keys() if theirs.get(n) != ours.get(n))
        if differing:
            name = differing[0]
            raise ValueError(
                f"{self.path} holds another run: its {name} is {theirs.get(name)}, this one's "
                f"{ours.get(name)} (differing: {', '.join(differing)}); choose another file"
            )
        if whole < self.path.stat().st_size:
            os.truncate(self.path, whole)
        return [EvaluatedBatch.from_dict(line) for line in lines]

    def append(self, batch: EvaluatedBatch) -> None:
        """Adds a finished batch, and waits until it is on disk."""
        is_new = not self.path.exists()
        with self.path.open("a", encoding="utf-8") as file:
            if is_new:
                file.write(json.dumps({"format": FORMAT, **self._about}) + "\n")
            file.write(json.dumps(batch.to_dict()) + "\n")
            file.flush()
            os.fsync(file.fileno())


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
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is no JSON: {error}") from None
            whole += len(text)
    if not lines:
        return None, [], 0
    if not isinstance(lines[0], dict) or lines[0].get("format") != FORMAT:
        raise ValueError(f"{path} is no evaluation: its first line must hold format {FORMAT!r}")
    return lines[0], lines[1:], whole
