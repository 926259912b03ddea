"""`RunCheckpoint`: a training run on disk, so that an interruption costs minutes."""

from __future__ import annotations

import shutil
from pathlib import Path

from accelerate import Accelerator

from specdec.training.data import PackedStream
from specdec.training.plan import TrainingProgress


class RunCheckpoint:
    """Modules, optimisers, generators, stream and progress of one run, in one folder.

    A whole checkpoint is left whenever an interruption comes: a new one is written beside the last,
    which is renamed, and deleted only after the new one has its name.

    Args:
        work_dir: holds the folder.
        accelerator: that has prepared the module and the optimisers.
        progress: kept with them.
        stream: kept with them.
    """

    def __init__(
        self,
        work_dir: Path,
        accelerator: Accelerator,
        progress: TrainingProgress,
        stream: PackedStream,
    ):
        self.folder = work_dir / "checkpoint"
        self._fresh, self._last = work_dir / "checkpoint.new", work_dir / "checkpoint.old"
        self._accelerator = accelerator
        accelerator.register_for_checkpointing(progress, stream)

    def load(self) -> None:
        """Sets everything to what the folder holds, if there is one.

        Raises:
            ValueError: it does not fit what is being trained.
        """
        folder = self.folder if self.folder.exists() else self._last
        if not folder.exists():
            return
        try:
            self._accelerator.load_state(str(folder))
        except (RuntimeError, ValueError, KeyError) as error:
            raise ValueError(
                f"the checkpoint in {folder} is of another run, delete it or choose another "
                f"work_dir: {error}"
            ) from error

    def save(self) -> None:
        """Writes the folder anew; all processes call it."""
        accelerator = self._accelerator
        if accelerator.is_main_process:
            shutil.rmtree(self._fresh, ignore_errors=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(self._fresh))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            if self.folder.exists():
                shutil.rmtree(self._last, ignore_errors=True)
                self.folder.rename(self._last)
            self._fresh.rename(self.folder)
            shutil.rmtree(self._last, ignore_errors=True)
        accelerator.wait_for_everyone()
