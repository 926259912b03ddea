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
            ValueError: it is of another run, names the settings that differ; or it is damaged.
        """
        folder = self.folder if self.folder.exists() else self._last
        if not folder.exists():
            return
        advice = "delete it or choose another work_dir"
        try:
            theirs = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(
                f"the checkpoint in {folder} does not say of which run it is, {advice}: "
                f"{SETTINGS}: {error}"
            ) from error
        differing = differences(theirs if isinstance(theirs, dict) else {}, self._settings)
        if differing:
            raise ValueError(
                f"the checkpoint in {folder} is of another run, {advice}; they differ in "
                f"{', '.join(differing)}"
            )
        try:
            self._accelerator.load_state(str(folder))
        except Exception as error:  # damaged files end in errors of any kind
            raise ValueError(
                f"the checkpoint in {folder} is damaged, {advice}: {type(error).__name__}: {error}"
            ) from error

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
