"""`RunCheckpoint`: a training run on disk, so that an interruption costs minutes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from specdec.settings import differences
from specdec.training.data import PackedStream
from specdec.training.plan import TrainingProgress

SETTINGS = "settings.json"


class CheckpointError(ValueError):
    """A checkpoint that a run cannot go on from.

    Args:
        folder: of the checkpoint.
        fault: what is wrong with it.
        details: of that, after the advice.
        is_another_run: it is whole, and of a run with other settings.
    """

    def __init__(self, folder: Path, fault: str, details: str, *, is_another_run: bool = False):
        self.folder, self.is_another_run = folder, is_another_run
        self._fault, self._details = fault, details
        super().__init__(self.text("work_dir"))

    def text(self, place: str, details: str | None = None) -> str:
        """The message.

        Args:
            place: name of the argument that chooses the folder.
            details: other ones than those of the error.
        """
        advice = f"delete it or choose another {place}"
        details = self._details if details is None else details
        return f"the checkpoint in {self.folder} {self._fault}, {advice}{details}"


class RunCheckpoint:
    """Modules, optimisers, generators, stream and progress of one run, in one folder.

    A whole checkpoint is left whenever an interruption comes: a new one is written beside the last,
    which is renamed, and deleted only after the new one has its name.

    Args:
        work_dir: holds the folder.
        accelerator: that has prepared the module and the optimisers.
        progress: kept with them.
        stream: kept with them.
        settings: of the run; it goes on with no others.
    """

    def __init__(
        self,
        work_dir: Path,
        accelerator: Accelerator,
        progress: TrainingProgress,
        stream: PackedStream,
        settings: dict[str, Any],
    ):
        self.folder = work_dir / "checkpoint"
        self._fresh, self._last = work_dir / "checkpoint.new", work_dir / "checkpoint.old"
        self._accelerator = accelerator
        self._settings = json.loads(json.dumps(settings))
        accelerator.register_for_checkpointing(progress, stream)

    def load(self) -> None:
        """Sets everything to what the folder holds, if there is one.

        Raises:
            CheckpointError: it is of another run, names the settings that differ; or it is
                damaged.
        """
        folder = self.folder if self.folder.exists() else self._last
        if not folder.exists():
            return
        try:
            theirs = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            fault = "does not say of which run it is"
            raise CheckpointError(folder, fault, f": {SETTINGS}: {error}") from error
        differing = differences(theirs if isinstance(theirs, dict) else {}, self._settings)
        if differing:
            # Shapes of parameters follow from other settings, but for those of a user's objective.
            chosen = [name for name in differing if not name.startswith("objective.parameters.")]
            details = f"; they differ in {', '.join(chosen or differing)}"
            raise CheckpointError(folder, "is of another run", details, is_another_run=True)
        try:
            self._accelerator.load_state(str(folder))
        except Exception as error:  # damaged files end in errors of any kind
            details = f": {type(error).__name__}: {error}"
            raise CheckpointError(folder, "is damaged", details) from error

    def save(self) -> None:
        """Writes the folder anew; all processes call it."""
        accelerator = self._accelerator
        if accelerator.is_main_process:
            shutil.rmtree(self._fresh, ignore_errors=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(self._fresh))
        if accelerator.is_main_process:
            (self._fresh / SETTINGS).write_text(json.dumps(self._settings), encoding="utf-8")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            if self.folder.exists():
                shutil.rmtree(self._last, ignore_errors=True)
                self.folder.rename(self._last)
            self._fresh.rename(self.folder)
            shutil.rmtree(self._last, ignore_errors=True)
        accelerator.wait_for_everyone()
