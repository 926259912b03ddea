"""What a run measured, batch by batch, and its file, which an interrupted run goes on with."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from specdec.arguments import check_integer, check_number
from specdec.lab.evaluation.shared_file import SharedFile
from specdec.lab.trace.saved_step import read_step
from specdec.row_step import RowStep


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
            EvaluatedRow(**{**row, "steps": [read_step(step) for step in row["steps"]]})
            for row in saved["rows"]
        ]
        check_integer("batch", saved["batch"], 0)
        for seconds in saved["seconds"]:
            check_number("seconds", seconds, 0)
        if not rows or len(saved["seconds"]) != len({row.turn for row in rows}):
            raise ValueError("expected rows, and seconds of each turn")
        return cls(saved["batch"], saved["seconds"], rows)


class RunFile(SharedFile[EvaluatedBatch]):
    """A line about the run, then a line per batch, which is on disk before the next begins."""

    FORMAT = "specdec.evaluation/1"

    @property
    def is_begun(self) -> bool:
        """Whether a first line is whole: a process that is killed may leave less."""
        for file in self.files:
            with suppress(FileNotFoundError), file.open("rb") as opened:
                if opened.readline().endswith(b"\n"):
                    return True
        return False

    def read(self) -> tuple[dict[str, Any], list[EvaluatedBatch]]:
        """What the first line says about the run, and its finished batches, in all of its parts. A
        last line that an interruption cut off is left out.

        Raises:
            ValueError: another kind of file, or a line that is no batch or repeats one; names it.
        """
        batches = list(self.refresh().values())
        if self.about is None:
            if self.path.exists():
                raise ValueError(f"{self.path} is no evaluation: it has no whole first line")
            raise FileNotFoundError(f"there is no run {self.path}")
        return self.about, batches

    def _parsed(self, content: dict[str, Any]) -> tuple[int, EvaluatedBatch]:
        batch = EvaluatedBatch.from_dict(content)
        return batch.index, batch

    def _saved(self, line: EvaluatedBatch) -> dict[str, Any]:
        return line.to_dict()
