"""What a run measured, batch by batch, and its file, which an interrupted run goes on with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specdec.arguments import check_integer, check_number
from specdec.jsonl import append_lines, naming_line, read_lines
from specdec.results import RowStep
from specdec.settings import differences

try:
    import fcntl
except ImportError:  # not on Windows, where nothing keeps two processes from one file
    fcntl = None

_FORMAT = "specdec.evaluation/1"
_BEGINNING = json.dumps({"format": _FORMAT})[:-1].encode()


@dataclass(frozen=True, eq=False)
class EvaluatedRow:
    """One turn of one prompt. Turns and samples are counted from 0.

    Args:
        prompt: its id.
        num_prompt_tokens: that were read.
        was_cut: the prompt had more, and lost its first ones.
        seed: of the row; `None` for greedy text.
    """

    prompt: str
    category: str
    turn: int
    sample: int
    num_prompt_tokens: int
    was_cut: bool
    finish_reason: Literal["eos", "length", "stop"]
    seed: int | None
    steps: list[RowStep]

    @property
    def key(self) -> tuple[str, int, int]:
        """What names the row in its run: prompt, turn and sample."""
        return self.prompt, self.turn, self.sample

    @property
    def new_tokens(self) -> list[int]:
        """The text."""
        return [token for step in self.steps for token in step.new_tokens]


@dataclass(frozen=True, eq=False)
class EvaluatedBatch:
    """Rows that were generated together.

    Args:
        index: of the batch in the run.
        seconds: of wall-clock for each turn, reading the prompts included.
        rows: of all turns.
    """

    index: int
    seconds: list[float]
    rows: list[EvaluatedRow]

    @property
    def num_new_tokens(self) -> int:
        """Of all rows."""
        return sum(len(row.new_tokens) for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; `from_dict` reads it."""
        rows = [{**vars(row), "steps": [step.saved() for step in row.steps]} for row in self.rows]
        return {"batch": self.index, "seconds": self.seconds, "rows": rows}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> EvaluatedBatch:
        """Reads what `to_dict` wrote; `KeyError`, `TypeError` or `ValueError` for wrong numbers."""
        rows = [
            EvaluatedRow(**{**row, "steps": [RowStep.from_saved(step) for step in row["steps"]]})
            for row in saved["rows"]
        ]
        check_integer("batch", saved["batch"], 0)
        for seconds in saved["seconds"]:
            check_number("seconds", seconds, 0)
        if not rows or len(saved["seconds"]) != len({row.turn for row in rows}):
            raise ValueError("expected rows, and seconds of each turn")
        return cls(saved["batch"], saved["seconds"], rows)


class RunFile:
    """JSONL: a line about the run, then a line per finished batch, on disk before the next begins.
    The first batch makes the file.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    @property
    def is_begun(self) -> bool:
        """Whether there is a whole first line: a process that is killed may leave less."""
        if not self.path.exists():
            return False
        with self.path.open("rb") as file:
            return file.readline().endswith(b"\n")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other processes from the file, until its end or the end of this process; without
        a finished batch there is no file afterwards.

        Raises:
            OSError: the file cannot be written.
            ValueError: another process holds it.
        """
        with self.path.open("ab") as file:
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{self.path} is being written by another process; wait for its end, or share "
                    "the prompts with it: evaluate(..., share=True) under accelerate launch"
                ) from None
            except OSError:  # a file system without locks
                pass
            try:
                yield
            finally:
                if os.fstat(file.fileno()).st_size == 0:
                    self.path.unlink(missing_ok=True)

    def read(self) -> tuple[dict[str, Any], list[EvaluatedBatch]]:
        """What the first line says about the run, and its finished batches. A last line that an
        interruption cut off is left out.

        Raises:
            ValueError: another kind of file, or a line that is no batch or repeats one; names it.
        """
        lines = read_lines(self.path, only_whole=True)
        _, header = next(lines, (1, None))
        is_run = isinstance(header, dict) and header.pop("format", None) == _FORMAT
        if not is_run or not isinstance(header.get("run"), dict):
            raise ValueError(
                f"{self.path} is no evaluation: its first line must hold format {_FORMAT!r} and "
                "the run"
            )
        batches: dict[int, EvaluatedBatch] = {}
        for number, line in lines:
            with naming_line(self.path, number):
                batch = EvaluatedBatch.from_dict(line)
                if batches.setdefault(batch.index, batch) is not batch:
                    raise ValueError(f"batch {batch.index} comes twice")
        return header, [batches[index] for index in sorted(batches)]

    def resume(self, about: dict[str, Any]) -> list[EvaluatedBatch]:
        """The finished batches of the same run, none where there is no file. A last line that an
        interruption cut off is removed from the file: its batch is done again.

        Args:
            about: of the run; its entry `run` must equal that of the file.

        Raises:
            ValueError: the file is of another run; says what differs.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content.rfind(b"\n") + 1
        if not whole:
            if not _BEGINNING.startswith(content[: len(_BEGINNING)]):
                raise ValueError(
                    f"{self.path} is no evaluation and would be lost; choose another file"
                )
            if content:  # interrupted while its first line was written
                os.truncate(self.path, 0)
            return []
        header, batches = self.read()
        if differing := differences(header["run"], json.loads(json.dumps(about["run"]))):
            raise ValueError(
                f"{self.path} holds another run; they differ in {', '.join(differing)}; choose "
                "another file"
            )
        os.truncate(self.path, whole)
        return batches

    def append(self, batch: EvaluatedBatch, about: dict[str, Any]) -> None:
        """Adds a finished batch, and waits until it is on disk.

        Raises:
            OSError: it could not be written; the file holds the batches before it.
        """
        is_new = not self.path.exists() or not self.path.stat().st_size
        append_lines(self.path, *[{"format": _FORMAT, **about}][:is_new], batch.to_dict())
