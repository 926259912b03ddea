"""On a full disk, and in a process that is killed, a file that is written is the old one or the new
one, of every kind that the library writes.

The operating system plays the full disk: beyond `RLIMIT_FSIZE` a write of whatever library fails,
after the first bytes, or ends the process.
"""

import ast
import json
import os
import resource
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from drafter_table import MODEL, make
from mtp_checkpoints import random_model

from specdec import SpeculativeGenerator, SuffixDrafter, evaluate
from specdec.atomic import append, replacing, replacing_files, write_text
from specdec.drafters import MTPDrafter
from specdec.lab.evaluation import Evaluation
from specdec.lab.evaluation.run_file import RunFile
from specdec.lab.evaluation.study import StudyFolder
from specdec.lab.trace import Trace
from specdec.lab.training.follow import FollowTarget
from specdec.lab.training.mtp import new_head
from specdec.lab.training.trainer import last_checkpoint

ROOT = Path(__file__).parents[1]
IDS = torch.tensor([[7, 8, 9]])


@contextmanager
def full_disk(size: int):
    """Files of this process cannot grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def killed(act) -> int:
    """The signal that ended a process which did something."""
    if (child := os.fork()) == 0:
        with suppress(BaseException):
            act()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def killed_by_full_disk(act, size: int) -> int:
    """The signal that ended a process in the middle of a write."""

    def act_within():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        with full_disk(size):
            act()

    return killed(act_within)


def contents(folder: Path) -> dict[str, bytes]:
    """Of every file but the parts that a killed process leaves."""
    files = [f for f in folder.rglob("*") if f.is_file() and ".part" not in str(f)]
    return {str(f.relative_to(folder)): f.read_bytes() for f in files}


def trace_of(tokens: int) -> Trace:
    options = {"max_new_tokens": tokens, "eos_token_id": None, "trace": True}
    return SpeculativeGenerator(MODEL, "lookup").generate(IDS, **options).trace


def study(folder: Path, cells: int) -> None:
    names = [str(i) for i in range(cells)]
    files = [f"{name}.jsonl" for name in names]
    StudyFolder(folder).add([{"drafter": name} for name in names], files, timed=True)


def memory(path: Path, count: int) -> None:
    drafter = SuffixDrafter(2, max_tokens=64)
    drafter.remember([list(range(count))])
    drafter.save(path)


def head(folder: Path, scale: int) -> None:
    drafter = make("eagle3")
    with torch.no_grad():
        next(drafter.parameters()).mul_(1 + scale / 100)
    drafter.save_pretrained(folder, "speculators", verifier="it" * scale)


def modules(folder: Path, scale: int) -> None:
    target = random_model("Qwen2")
    own = new_head(target, layout="MiMo")
    with torch.no_grad():
        for x in own.parameters():
            x.fill_(scale / 100)
    MTPDrafter(own, target, 3).save_pretrained(folder, "MiMo", target)


def follower(folder: Path, scale: int) -> None:
    fake = SimpleNamespace(state_dict=lambda: {"rollouts": torch.full((999,), scale)})
    args = SimpleNamespace(save_only_model=False, world_size=1, output_dir=str(folder))
    state = SimpleNamespace(is_world_process_zero=True, global_step=1)
    (folder / "checkpoint-1").mkdir(exist_ok=True)
    FollowTarget.on_save(fake, args, state, None)


KINDS = {
    "study.json": study,
    "trace, jsonl": lambda f, n: trace_of(4 * n).to_jsonl(f / "t.jsonl"),
    "trace, html": lambda f, n: trace_of(4 * n).to_html(f / "t.html"),
    "trace, parquet": lambda f, n: trace_of(4 * n).to_parquet(f / "t.parquet"),
    "memory": lambda f, n: memory(f / "m.safetensors", 8 * n),
    "head": head,
    "modules": modules,
    "follower": follower,
    "text": lambda f, n: write_text(f / "a.txt", "abc" * n * 999),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_or_a_killed_process_leaves_the_old_file(kind, tmp_path):
    write = KINDS[kind]
    write(tmp_path, 1)
    old = contents(tmp_path)
    assert old
    size = 40  # bytes, fewer than any of these files has
    with full_disk(size), pytest.raises(Exception, match=r"(?i)too large|os error 27"):
        write(tmp_path, 2)
    assert contents(tmp_path) == old
    assert not list(tmp_path.rglob("*.part"))
    assert killed_by_full_disk(lambda: write(tmp_path, 2), size) == signal.SIGXFSZ
    assert contents(tmp_path) == old
    write(tmp_path, 2)
    assert contents(tmp_path) != old
    assert contents(tmp_path).keys() == old.keys()


def test_a_process_that_is_killed_at_any_moment_leaves_a_whole_file(tmp_path):
    """SIGKILL, at 20 moments of a process that writes all the time."""
    path, texts = tmp_path / "numbers.json", [json.dumps([i] * 40_000) for i in range(2)]
    write_text(path, texts[0])
    seen = set()
    for trial in range(20):
        if (child := os.fork()) == 0:
            while True:
                for text in reversed(texts):
                    write_text(path, text)
        time.sleep(0.005 * 1.25**trial)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seen.add(path.read_text())
    assert seen <= set(texts)
    assert len(seen) == 2
    assert list(tmp_path.glob("*.part"))  # some were killed in the middle


def run_of(path: Path, count: int) -> Evaluation:
    prompts = [[1 + i, 2, 3] for i in range(count)]
    return evaluate(SpeculativeGenerator(MODEL, None), prompts, max_new_tokens=4, output=path)


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_part_of_it(tmp_path):
    """In the process that goes on, and in one that comes later."""
    run_of(tmp_path / "run.jsonl", 3)
    path = tmp_path / "run.jsonl"
    whole, (about, batches) = path.read_bytes(), RunFile(path).read()
    path.unlink()
    file = RunFile(path, about)
    file.append(*batches[:2])
    kept = file.part.read_bytes()
    assert whole.startswith(kept)
    with full_disk(len(whole) - 9), pytest.raises(OSError, match="too large"):
        file.append(batches[-1])
    assert file.part.read_bytes() == kept
    file.append(batches[-1])
    assert file.part.read_bytes() == whole
    file.part.write_bytes(kept)
    act = lambda: file.append(batches[-1])  # noqa: E731
    assert killed_by_full_disk(act, len(whole) - 9) == signal.SIGXFSZ
    assert file.part.read_bytes() == whole[:-9]
    assert len(RunFile(path).read()[1]) == 2
    assert len(run_of(path, 3).rows) == 3
    assert Evaluation.load(path).is_whole
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_whose_state_is_cut_off_is_none(tmp_path):
    for step, text in ((1, "{}"), (2, '{"global_st')):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(text)
    assert last_checkpoint(tmp_path).name == "checkpoint-1"


def test_links_modes_and_devices_stay_what_they_are(tmp_path):
    path, link = tmp_path / "a", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    write_text(link, "new")
    assert link.is_symlink()
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o640)
    write_text("/dev/null", "nothing")
    assert not Path("/dev/null").is_file()
    with pytest.raises(OSError, match="directory"):
        write_text(tmp_path, "a folder")


def test_files_of_a_folder_change_together_or_not_at_all(tmp_path):
    for name in ("config.json", "weights", "kept"):
        write_text(tmp_path / name, "old")

    def fails():
        with replacing_files(tmp_path) as new:
            write_text(new / "config.json", "new")
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert set(contents(tmp_path).values()) == {b"old"}
    with replacing_files(tmp_path) as new:
        write_text(new / "config.json", "new")
        write_text(new / "weights", "new")
    assert contents(tmp_path) == {"config.json": b"new", "weights": b"new", "kept": b"old"}
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_between_two_states_has_no_configuration(tmp_path, monkeypatch):
    """So that old weights are never read by a new one."""
    for name in ("config.json", "weights"):
        write_text(tmp_path / name, "old")
    seen, replace = [], os.replace

    def seeing(source, place):
        seen.append((Path(place).name, (tmp_path / "config.json").exists()))
        replace(source, place)

    with replacing_files(tmp_path) as new:
        write_text(new / "config.json", "new")
        write_text(new / "weights", "new")
        monkeypatch.setattr(os, "replace", seeing)
    assert seen == [("weights", False), ("config.json", False)]


def test_a_write_that_fails_names_the_error_and_appends_nothing(tmp_path):
    append(tmp_path / "lines", b"first\n")
    with full_disk(10), pytest.raises(OSError, match="too large"):
        append(tmp_path / "lines", b"second\n")
    assert (tmp_path / "lines").read_bytes() == b"first\n"
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "lines"):
        1 / 0  # noqa: B018
    assert (tmp_path / "lines").read_bytes() == b"first\n"


IN_PLACE = {"write_text", "write_bytes", "save_file", "savez_compressed", "savefig", "write_table"}
"""Of other libraries; those that are given a file of `replacing` are right."""


def writes_of(file: Path) -> list[int]:
    """Lines that write a file in place."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        is_method = isinstance(node.func, ast.Attribute)
        own = node.args if is_method else node.args[1:]  # the first one of `open` is the file
        modes = [a.value for a in own if isinstance(a, ast.Constant)]
        modes += [k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)]
        is_open = name == "open" and any(
            isinstance(mode, str) and set(mode) <= set("wax+bt") and set(mode) & set("wax+")
            for mode in modes
        )
        names = [arg.id for arg in node.args if isinstance(arg, ast.Name)]
        is_write = (name in IN_PLACE and is_method) or ast.unparse(node.func) == "torch.save"
        if is_open or (is_write and not {"file", "new"} & set(names)):
            found.append(node.lineno)
    return found


def test_nothing_of_ours_writes_a_file_in_place(tmp_path):
    files = [*(ROOT / "specdec").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]
    found = {str(file.relative_to(ROOT)): lines for file in files if (lines := writes_of(file))}
    markers = found.pop("specdec/lab/evaluation/markers.py")  # files that must not be there before
    assert len(markers) == 1
    assert set(found) == {"specdec/atomic.py"}
    guilty = tmp_path / "guilty.py"
    guilty.write_text("path.write_text('a')\nopen('a', 'w')\npath.open(mode='ab')\nopen('a')\n")
    assert writes_of(guilty) == [1, 2, 3]
