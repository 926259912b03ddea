"""A folder whose files are replaced has the old ones, the new ones, or an error that says what
happened: real processes are killed at each step, and save at the same time.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch
from drafter_table import make
from mtp_checkpoints import random_model

from specdec import atomic
from specdec.atomic import check_whole, finish_replacing, replacing_files, write_text
from specdec.checkpoints.files import CheckpointFolder
from specdec.drafters import MTPDrafter
from specdec.lab.training.mtp import new_head
from specdec.loading import find_pretrained

STEPS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}
"""Of a process, as the interpreter reports them."""


def ends_at_step(act, folder: Path, number: int) -> bool:
    """Whether a process that did something was killed before its step of that number, in which it
    would have renamed or removed something.
    """
    if (child := os.fork()) == 0:
        steps = iter([True] * number)

        def watch(event, args):
            if event in STEPS and str(args[0]).startswith(str(folder)) and not next(steps, False):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        with suppress(BaseException):
            act()
            os._exit(0)
        os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def contents(folder: Path) -> dict[str, bytes]:
    """Of every file but those that wait for their places."""
    files = [f for f in folder.rglob("*") if f.is_file() and ".specdec-" not in str(f)]
    return {str(f.relative_to(folder)): f.read_bytes() for f in files}


def save_texts(folder: Path, text: str, *parts: str) -> None:
    with replacing_files(folder, instead_of="part-*") as new:
        for name in ("config.json", "weights", *parts):
            write_text(new / name, text)
        (new / "below").mkdir()
        write_text(new / "below" / "a file", text)


def test_a_process_that_is_killed_at_any_step_leaves_the_old_files_the_new_ones_or_an_error(
    tmp_path,
):
    seen, number, goes_on = [], 0, True
    while goes_on:
        folder = tmp_path / str(number)
        save_texts(folder, "old", "part-1", "part-2")
        old = contents(folder)
        goes_on = ends_at_step(lambda to=folder: save_texts(to, "new", "part-3"), folder, number)
        found = contents(folder)
        if "config.json" in found:
            check_whole(folder)
            assert found == old or set(found.values()) == {b"new"}
            assert set(found) == set(old) or "part-3" in found
            assert "part-1" not in found or "part-3" not in found
            seen.append(found["config.json"])
        else:
            with pytest.raises(ValueError, match="Wait, or save again"):
                check_whole(folder)
            seen.append(None)
        save_texts(folder, "newer")
        assert set(contents(folder)) == {"config.json", "weights", "below/a file"}
        assert set(contents(folder).values()) == {b"newer"}
        assert not (folder / ".specdec-moving").exists()
        number += 1
    assert seen == sorted(seen, key=[b"old", None, b"new"].index)  # never back
    assert set(seen) == {b"old", None, b"new"}


def save_head(folder: Path, scale: float) -> None:
    drafter = make("eagle3")
    with torch.no_grad():
        next(drafter.parameters()).fill_(scale)
    drafter.save_pretrained(folder, "speculators", verifier=f"it {scale}")


def save_modules(folder: Path, scale: float) -> None:
    target = random_model("Qwen2")
    own = new_head(target, layout="MiMo")
    with torch.no_grad():
        for x in own.parameters():
            x.fill_(scale)
    MTPDrafter(own, target, 3).save_pretrained(folder, "MiMo", target)


@pytest.mark.parametrize("save", [save_head, save_modules])
def test_a_head_whose_save_was_cut_off_is_not_read_and_can_be_saved_again(save, tmp_path):
    wholes = []
    for scale in (0.25, 0.5):
        save(tmp_path / str(scale), scale)
        wholes.append(contents(tmp_path / str(scale)))
    number, goes_on, errors = 0, True, 0
    while goes_on:
        folder = tmp_path / f"step {number}"
        save(folder, 0.25)
        goes_on = ends_at_step(lambda to=folder: save(to, 0.5), folder, number)
        if (folder / "config.json").exists():
            CheckpointFolder(folder)
            assert contents(folder) in wholes
        else:
            for read in (CheckpointFolder, lambda path: find_pretrained(str(path))):
                with pytest.raises(ValueError, match=r"no config\.json\. Wait, or save again"):
                    read(folder)
            errors += 1
        save(folder, 0.25)
        assert contents(folder) == wholes[0]
        number += 1
    assert errors > 1


def test_what_was_left_is_moved_by_hand_or_by_a_call(tmp_path):
    for number in range(99):
        folder = tmp_path / str(number)
        save_texts(folder, "old")
        assert ends_at_step(lambda to=folder: save_texts(to, "new"), folder, number)
        if not (folder / "config.json").exists():
            break
    finish_replacing(folder)
    assert set(contents(folder).values()) == {b"new"}
    assert not (folder / ".specdec-moving").exists()
    finish_replacing(folder)
    finish_replacing(tmp_path / "nowhere")


def save_slowly(folder: Path, text: str, names: list[str], pauses: dict[int, float]) -> None:
    """By a process that waits so many seconds before its move of a number."""
    moves, replace = count(), os.replace

    def slow(source, place):
        time.sleep(pauses.get(next(moves), 0))
        replace(source, place)

    os.replace = slow
    with replacing_files(folder) as new:
        for name in names:
            (new / name).write_text(text)


def test_of_two_processes_that_save_at_once_the_files_of_one_are_found(tmp_path):
    """One begins, the other one moves all of its files, if it can, and the first one goes on."""
    names = [*(f"file {number}" for number in range(9)), "config.json"]
    children = []
    for text, pauses in (("one", {5: 1.0}), ("two", {0: 0.4})):
        if (child := os.fork()) == 0:
            with suppress(BaseException):
                save_slowly(tmp_path, text, names, pauses)
                os._exit(0)
            os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert len(set(contents(tmp_path).values())) == 1
    assert {path.name for path in tmp_path.iterdir()} == set(names)


def test_without_locks_the_second_of_two_is_refused_and_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "fcntl", None)
    save_texts(tmp_path, "old")
    replace = os.replace

    def second(source, place):  # while the first one moves its files
        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(OSError, match="another process is replacing its files, or was killed"):
            save_texts(tmp_path, "second")
        replace(source, place)

    with replacing_files(tmp_path) as new:
        for name in ("config.json", "weights", "below"):
            if name == "below":
                (new / name).mkdir()
                name = "below/a file"
            write_text(new / name, "first")
        monkeypatch.setattr(os, "replace", second)
    assert set(contents(tmp_path).values()) == {b"first"}
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "weights", "below"}


def test_files_beside_a_configuration_change_while_it_is_away(tmp_path, monkeypatch):
    """A tokenizer, which has none of its own."""
    save_texts(tmp_path, "old")
    seen, replace = [], os.replace

    def seeing(source, place):
        seen.append((Path(place).name, (tmp_path / "config.json").exists()))
        replace(source, place)

    with replacing_files(tmp_path) as new:
        write_text(new / "weights", json.dumps("new"))
        monkeypatch.setattr(os, "replace", seeing)
    assert seen == [("weights", False), ("config.json", False)]
    assert (tmp_path / "config.json").read_text() == "old"
