"""`RunRecord`: with which arguments `specdec train` was called, beside the checkpoint of the run.

The checkpoint decides whether a run goes on; it is read after models and text. From this file the
command says before that that a run is complete, and names the arguments of another run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from specdec.settings import plain
from specdec.training.plan import TrainingProgress

_FREE = ("output", "steps", "minutes", "accumulation", "checkpoint_minutes", "evaluate_every")
_FREE += ("compile",)
"""Arguments with which a run goes on whatever they are."""


class RunRecord:
    """The arguments of a training run, the files that they name, and how the run ended.

    Args:
        options: of the command.
    """

    def __init__(self, options: argparse.Namespace):
        self.path = options.output / "run" / "command.json"
        self._arguments = {n: plain(v) for n, v in vars(options).items() if n not in _FREE}
        self._files = {name: _stamps(getattr(options, name)) for name in ("target", "data")}

    def finished(self) -> dict[str, Any] | None:
        """What `finish` wrote, if it was a run with these arguments on the same files."""
        saved = self._read()
        is_same = saved.get("arguments") == self._arguments and saved.get("files") == self._files
        end = saved.get("finished")
        numbers = ("num_steps", "wall_s")
        is_whole = isinstance(end, dict) and all(type(end.get(n)) in (int, float) for n in numbers)
        is_whole = is_whole and isinstance(end.get("evaluation"), dict | None)
        return end if is_same and is_whole else None

    def begin(self) -> None:
        """Writes the arguments, unless a run has begun here already."""
        if not any(self.path.parent.glob("checkpoint*")):
            self._write(None)

    def finish(self, progress: TrainingProgress) -> None:
        """Writes the arguments and the end of the run."""
        evaluation = progress.evaluations[-1] if progress.evaluations else None
        end = {"num_steps": progress.num_steps, "wall_s": progress.wall_s, "evaluation": evaluation}
        self._write(end)

    def differences(self) -> list[str]:
        """The arguments in which the run that has begun here differs from this one."""
        theirs = self._read().get("arguments")
        theirs = theirs if isinstance(theirs, dict) else self._arguments
        return [
            f"{_flag(name)} ({_shown(theirs.get(name))} there, {_shown(value)} here)"
            for name, value in self._arguments.items()
            if theirs.get(name) != value
        ]

    def _read(self) -> dict[str, Any]:
        """Empty where there is no such file, or something else."""
        try:
            saved = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return saved if isinstance(saved, dict) else {}

    def _write(self, end: dict[str, Any] | None) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"arguments": self._arguments, "files": self._files, "finished": end}
        self.path.write_text(json.dumps(content), encoding="utf-8")


def _stamps(name: str) -> list[list[Any]]:
    """Name, size and time of change of each file of a folder or path; none for `"zoo"` and ids."""
    path = Path(name).expanduser()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    found = [(file, file.stat()) for file in files if file.is_file()]
    return [[str(file), stat.st_size, stat.st_mtime_ns] for file, stat in found]


def _flag(name: str) -> str:
    return name if name == "kind" else f"--{name.replace('_', '-')}"


def _shown(value: Any) -> str:
    return "not given" if value is None else str(value)
