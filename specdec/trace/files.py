"""Traces on disk: JSONL that is read back, Parquet for other tools."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.trace.record import Trace

FORMAT = "specdec.trace/2"


def need(module: str, what: str) -> Any:
    """An optional library.

    Raises:
        ImportError: it is not installed; the message names what needs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        extra = "specdec-torch[plots]"
        raise ImportError(f"{what} needs {module}: pip install '{extra}'") from error


def write_parquet(frame: Any, path: Path, about: dict) -> None:
    """Writes a frame with `about` under the metadata key `specdec`."""
    arrow, parquet = need("pyarrow", "to_parquet()"), need("pyarrow.parquet", "to_parquet()")
    table = arrow.Table.from_pandas(frame)
    metadata = {**(table.schema.metadata or {}), b"specdec": json.dumps(about).encode()}
    parquet.write_table(table.replace_schema_metadata(metadata), path)


def write_jsonl(trace: Trace, path: Path) -> None:
    """One line about the generation, then one per step of a row."""
    with path.open("w", encoding="utf-8") as file:
        times = [dataclasses.astuple(taken) for taken in trace.times]
        header = {"format": FORMAT, "about": trace.about, "prompts": trace.prompts, "times": times}
        header["steps"] = [len(row) for row in trace.steps]
        file.write(json.dumps(header) + "\n")
        for row, (steps, numbers) in enumerate(zip(trace.steps, trace.numbers, strict=True)):
            for step, their in zip(steps, numbers, strict=True):
                line = {"row": row, **vars(step), **dataclasses.asdict(their)}
                file.write(json.dumps(line) + "\n")


def read_jsonl(path: Path) -> tuple[dict, list[dict]]:
    """The header and the lines of a file that `write_jsonl` wrote."""
    lines = []
    with path.open("rb") as file:  # split at newlines only
        for number, text in enumerate(file, start=1):
            try:
                lines.append(json.loads(text))
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {number} is no JSON ({error}); the file may have been cut off: "
                    "write the trace again"
                ) from None
    if not lines or not isinstance(lines[0], dict) or lines[0].get("format") != FORMAT:
        raise ValueError(f"{path} is no trace: its first line must hold format {FORMAT!r}")
    return lines[0], lines[1:]


@contextmanager
def naming(path: Path, number: int) -> Iterator[None]:
    """Errors about a line's content name the file and the line."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path}, line {number} has no {error.args[0]!r}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}, line {number} is damaged: {error}") from None
