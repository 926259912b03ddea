"""Any number of processes fill one folder: every number is one process's, whoever is killed."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from architectures import build
from tqdm import tqdm

from specdec import SpeculativeGenerator, zoo
from specdec.lab.evaluation import Study, markers, sweep, write_answers
from specdec.lab.evaluation.cells import StudyFolder
from specdec.lab.evaluation.markers import Markers
from specdec.lab.evaluation.paired import difference
from specdec.lab.evaluation.run_file import RunFile
from specdec.processes import Team, local_device

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
ROOT = Path(__file__).parents[2]
TARGET = build("llama")
PROMPTS = [[1 + i, 2, 3, 1 + i, 2] for i in range(3)]
FEW = {"drafters": ["lookup"], "drafts": [1, 2], "temperatures": [0.0, 1.0], "max_new_tokens": 4}
MANY = {**FEW, "drafters": {"one": "lookup", "two": "lookup"}, "drafts": [1, 2, 3, 4]}
MANY |= {"temperatures": [0.0, 0.5, 1.0], "max_new_tokens": 3}


def forked(act, *args) -> int:
    """A process that does something, and ends with status 1 where it raises."""
    if (child := os.fork()) == 0:
        tqdm.set_lock(threading.RLock())  # forked processes share one, and one is killed with it
        code = 1
        try:
            act(*args)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def ended(child: int) -> int:
    """How a process ended: 0, its status, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(folder: Path, study: dict, has_locks: bool, host: str | None = None) -> Study:
    """A process's study, which notes every text that it generates; of another machine, where it
    has a name of its own.
    """
    generate = SpeculativeGenerator.generate

    def noting(self, *args, **options):
        result = generate(self, *args, **options)
        with (folder.parent / "notes").open("a") as notes:
            notes.write(f"{os.getpid()}\n")
        return result

    def without_locks(*_):
        raise OSError(errno.ENOLCK, "no locks")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpeculativeGenerator, "generate", noting)
        patch.setattr(markers, "POLL_S", 0.02)
        asked = "specdec.lab.evaluation.run.provenance"
        patch.setattr(asked, dict)  # git, for each cell
        if not has_locks:
            patch.setattr("fcntl.flock", without_locks)
        if host is not None:
            patch.setattr(markers, "_place", lambda: host)
            patch.setattr(markers, "BEAT_S", 0.05)
            patch.setattr(markers, "PATIENCE_S", 1.0)
        return sweep(TARGET, PROMPTS, **study, output=folder)


def numbers(study: Study) -> list:
    """All that is measured, but for times."""
    return [
        (cell, [asdict(row) for row in r.rows])
        for cell, r in zip(study.cells, study.runs, strict=True)
    ]


def check(folder: Path, expected: list) -> None:
    """The folder has every batch of every cell once, in the form of one process's study. What a
    killed process leaves besides has no line in it.
    """
    assert numbers(Study.load(folder)) == expected
    for path in folder.glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line.get("batch") for line in lines] == [None, *range(len(PROMPTS))]
    assert not [part for part in folder.glob(".*.parts/*.jsonl") if part.stat().st_size]


@pytest.fixture(scope="module")
def few():
    return numbers(sweep(TARGET, PROMPTS, **FEW))


@pytest.mark.parametrize("has_locks", [True, False])
def test_processes_share_a_study_and_none_does_what_another_has_done(has_locks, few, tmp_path):
    folder = tmp_path / "study"
    children = [forked(run, folder, FEW, has_locks) for _ in range(2)]
    assert [ended(child) for child in children] == [0, 0]
    check(folder, few)
    notes = Counter((tmp_path / "notes").read_text().split())
    assert sum(notes.values()) == 4 * len(PROMPTS)
    before = (tmp_path / "notes").stat().st_size
    assert numbers(run(folder, FEW, has_locks)) == few
    assert (tmp_path / "notes").stat().st_size == before


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_of_a_process_that_is_killed_others_do_the_rest(hosts, few, tmp_path):
    """Of this machine, and of another one, whose process ids mean nothing here."""
    folder, started = tmp_path / "study", tmp_path / "notes"
    first = forked(run, folder, FEW, False, hosts and hosts[0])
    while not (started.exists() and started.stat().st_size):
        time.sleep(0.001)
    second = forked(run, folder, FEW, False, hosts and hosts[1])
    os.kill(first, signal.SIGKILL)
    assert ended(first) == -signal.SIGKILL
    assert ended(second) == 0
    check(folder, few)
    lost = len(started.read_text().split()) - 4 * len(PROMPTS)
    assert lost in (0, 1)  # the batch that it was at


@pytest.mark.slow
@pytest.mark.parametrize("has_locks", [True, False])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_three_kills_among_many_processes_ten_times(count, has_locks, tmp_path):
    expected, generator = numbers(sweep(TARGET, PROMPTS, **MANY)), random.Random(count)
    assert len(expected) == 24
    for trial in range(10):
        folder = tmp_path / str(trial) / "study"
        folder.parent.mkdir()
        children = [forked(run, folder, MANY, has_locks) for _ in range(count)]
        for _ in range(3):
            time.sleep(generator.uniform(0, 2 / count))
            child = children.pop(generator.randrange(len(children)))
            os.kill(child, signal.SIGKILL)
            ended(child)
            children.append(forked(run, folder, MANY, has_locks))
        assert [ended(child) for child in children] == [0] * count
        check(folder, expected)
        notes = (folder.parent / "notes").read_text().split()
        files = len(list(folder.glob("*.jsonl")))
        assert 0 <= len(notes) - files * len(PROMPTS) <= 3  # the batches that the three were at


def test_of_twenty_additions_at_one_time_none_is_lost(tmp_path):
    begin = time.time() + 0.2

    def add(number: int) -> None:
        time.sleep(max(0, begin - time.time()))
        StudyFolder(tmp_path).add([{"draft": number}], [f"{number}.jsonl"], timed=False)

    children = [forked(add, number) for number in range(20)]
    assert [ended(child) for child in children] == [0] * 20
    cells, files, _ = StudyFolder(tmp_path).read()
    assert sorted(cell["draft"] for cell in cells) == list(range(20))
    assert files == [f"{cell['draft']}.jsonl" for cell in cells]
    assert [path.name for path in tmp_path.iterdir()] == ["study.json"]


@pytest.mark.parametrize("skew_s", [-300, 0, 300])
def test_a_living_process_of_another_machine_keeps_its_marker(skew_s, tmp_path, monkeypatch):
    """However its clock goes: what counts is that the time of its file moves."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(markers.time, "monotonic", lambda: now.s)
    monkeypatch.setattr(markers, "_place", lambda: "there")
    other = Markers(tmp_path / "run")
    other.enter()
    assert other.take(["a"]) == "a"
    monkeypatch.setattr(markers, "_place", lambda: "here")
    own = Markers(tmp_path / "run")
    own.enter()
    for _ in range(200):
        now.s += 10
        stamp = time.time() + skew_s + now.s
        os.utime(other.folder / "a", (stamp, stamp))
        assert own.take(["a"], abandoned=True) is None
    now.s += markers.PATIENCE_S - 1
    assert own.take(["a"], abandoned=True) is None
    now.s += 2
    assert own.take(["a"]) is None
    assert own.take(["a"], abandoned=True) == "a"  # it has stood still
    assert other.take(["a"], abandoned=True) is None


def without_links(*_):
    raise OSError(errno.EPERM, "no links")


@pytest.fixture(params=["links", "no links"])
def links(request, monkeypatch):
    """File systems that have links, and those that have none."""
    if request.param == "no links":
        monkeypatch.setattr("os.link", without_links)


def test_of_two_that_see_one_dead_process_one_alone_takes_its_piece(links, tmp_path):
    """Even if the other one has decided before that the marker is a dead one's."""
    second, third = Markers(tmp_path / "run"), Markers(tmp_path / "run")

    def first() -> None:
        own = Markers(tmp_path / "run")
        own.enter()
        assert own.take(["a"]) == "a"

    assert ended(forked(first)) == 0
    second.enter()
    third.enter()
    is_dead, taken = second._is_dead, []

    def slowly(marker: Path) -> bool:
        found = is_dead(marker)
        taken.append(third.take(["a"], abandoned=True))
        return found

    second._is_dead = slowly
    assert second.take(["a"], abandoned=True) is None
    assert taken == ["a"]
    third.release()
    assert second.take(["a"]) == "a"  # the dead marker is gone, too
    second.release()
    assert len(os.listdir(second.folder)) == 3  # a card of each


def test_wherever_a_process_is_killed_its_piece_is_free_at_once(tmp_path):
    """At each line that it runs while it takes a piece."""
    others, place = Markers(tmp_path / "run"), markers.__file__

    def killed_at(number: int) -> None:
        left = iter(range(number))

        def trace(frame, event, _):
            if frame.f_code.co_filename == place and event == "line" and next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        own = Markers(tmp_path / "run")
        own.enter()
        sys.settrace(trace)
        own.take(["a"])

    others.enter()
    statuses = []
    while 0 not in statuses:
        statuses.append(ended(forked(killed_at, len(statuses))))
        assert others.take(["a"], abandoned=True) == "a"
        others.release()
    assert len(statuses) > 10
    assert statuses[:-1] == [-signal.SIGKILL] * (len(statuses) - 1)


def test_a_link_whose_message_was_lost_is_known_as_ones_own(tmp_path, monkeypatch):
    """A network file system may make a link, and say at a second trial that it is there."""
    own, other, link = Markers(tmp_path / "run"), Markers(tmp_path / "run"), os.link

    def twice(old: Path, new: Path) -> None:
        link(old, new)
        link(old, new)

    own.enter()
    other.enter()
    monkeypatch.setattr("os.link", twice)
    assert own.take(["a"]) == "a"
    monkeypatch.setattr("os.listdir", lambda folder: [])  # which is a moment old
    assert other.take(["a"]) is None


@pytest.mark.parametrize("text", ["", "half-a-na", "x"])
def test_a_marker_whose_process_died_while_it_wrote_it_expires(text, tmp_path, monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(markers.time, "monotonic", lambda: now.s)
    own = Markers(tmp_path / "run")
    own.enter()
    (own.folder / "a").write_text(text)
    assert own.take(["a"], abandoned=True) is None
    now.s += markers.PATIENCE_S + 1
    assert own.take(["a"], abandoned=True) == "a"


def test_two_runs_of_other_settings_that_begin_at_one_time_are_told_apart(tmp_path):
    first, second = (RunFile(tmp_path / "run.jsonl", {"run": {"seed": s}}) for s in (1, 2))
    (batch, *_) = sweep(TARGET, PROMPTS, **FEW).runs[0].batches
    with first.joined(), second.joined():
        first.append(batch)
        with pytest.raises(ValueError, match=r"holds another run; they differ in seed \(1 there"):
            second.settle([0, 1])


def test_a_folder_that_vanishes_is_made_again(few, tmp_path):
    """After the last batch another process has removed it."""
    file = RunFile(tmp_path / "run.jsonl", {"run": {}})
    (batch, *_) = sweep(TARGET, PROMPTS, **FEW).runs[0].batches
    with file.joined():
        assert file.take(["0"]) == "0"
        (file.folder / file.name).unlink()
        (file.folder / "0").unlink()
        file.folder.rmdir()
        assert file.take(["0"]) is None
        other = RunFile(tmp_path / "run.jsonl", {"run": {}})
        other.enter()
        assert file.take(["0"]) is None  # it may be done: read first
        file.enter()
        assert file.take(["0"]) == "0"
        file.append(batch)
        assert file.settle([0])
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]
    assert RunFile(tmp_path / "run.jsonl").read()[1][0].index == 0


def test_answers_are_shared_likewise(tmp_path):
    prompts, tokenizer = zoo.heldout_prompts(3), zoo.load_tokenizer()
    generator = SpeculativeGenerator(zoo.load_target(), "lookup")
    options = {"tokenizer": tokenizer, "max_new_tokens": 4}

    def write(name: str, batch_size: int) -> None:
        write_answers(
            generator, prompts, tmp_path / name, batch_size=batch_size, temperature=1.0, **options
        )

    write("one.jsonl", 8)
    children = [forked(write, "two.jsonl", size) for size in (1, 2)]  # and of unlike batches
    assert [ended(child) for child in children] == [0, 0]
    assert (tmp_path / "two.jsonl").read_text() == (tmp_path / "one.jsonl").read_text()
    assert not list(tmp_path.glob(".*.parts"))


def test_of_processes_on_one_device_one_alone_measures_times(tmp_path):
    folder, generate = tmp_path / "study", SpeculativeGenerator.generate

    def noting(self, *args, **options):
        begun = time.monotonic()
        result = generate(self, *args, **options)
        with (tmp_path / "times").open("a") as file:
            file.write(f"{os.getpid()} {begun} {time.monotonic()}\n")
        return result

    def timed() -> None:
        SpeculativeGenerator.generate = noting
        study = {**FEW, "vary": {"batch_size": [1, 2]}, "temperatures": [0.0]}
        sweep(TARGET, PROMPTS, **study, timed=True, output=folder)

    children = [forked(timed) for _ in range(2)]
    assert [ended(child) for child in children] == [0, 0]
    lines = [line.split() for line in (tmp_path / "times").read_text().splitlines()]
    spans = sorted((float(begun), float(done), pid) for pid, begun, done in lines)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    study = Study.load(folder)
    assert len(study.runs) == 4
    assert len(lines) == 2 * (1 + 3) + 2 * (1 + 2)  # of each cell one batch before it is measured
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    first, second = study.runs[0], study.runs[2]
    assert not np.isnan(difference(first, second, "ms_per_token").value)
    second.about["run"]["device"] = "cuda (another one)"
    assert np.isnan(difference(first, second, "ms_per_token").value)
    assert not np.isnan(difference(first, second).value)
    assert set(study.to_frame()["device"]) == {first.about["run"]["device"], "cuda (another one)"}


def test_long_prompts_are_taken_first():
    """So that the last batches, for which others wait, are short."""
    taken, generate = [], SpeculativeGenerator.generate

    def noting(self, ids, mask, **options):
        taken.append(int(mask.sum()))
        return generate(self, ids, mask, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpeculativeGenerator, "generate", noting)
        prompts = [[7] * 3, [7] * 5, [7] * 2, [7] * 4]
        study = sweep(TARGET, prompts, drafts=[1], max_new_tokens=1)
    assert taken == [5, 4, 3, 2]
    assert [row.num_prompt_tokens for row in study.runs[0].rows] == [3, 5, 2, 4]


def test_an_error_in_memory_ends_all_processes_of_a_group(monkeypatch):
    gathered = []
    monkeypatch.setattr("accelerate.utils.gather_object", lambda found: gathered or found)
    assert Team(0, 2).gather([1]) == [1]
    assert Team(0, 2).gather([], ValueError("why")) == []  # which this process raises
    gathered += [([], True), ([1], False)]
    with pytest.raises(SystemExit) as end:
        Team(1, 2).gather([1])
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("variables", "place"),
    [({}, "cuda"), ({"SLURM_LOCALID": "3"}, "cuda:1"), ({"LOCAL_RANK": "1"}, "cuda:1")],
)
def test_each_task_of_srun_takes_a_gpu_of_its_machine(variables, place, monkeypatch):
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert local_device("cuda") == place
    assert local_device("cpu") == "cpu"


STUDY_FILE = """
drafters = ["lookup", "zoo:model"]
drafts = [1, 2]
temperatures = [0, 1]
limit = 4
max_new_tokens = 8
"""


@pytest.mark.slow
def test_a_job_array_and_srun_write_one_study(tmp_path):
    """Imitated by the variables that SLURM sets."""
    (tmp_path / "study.toml").write_text(STUDY_FILE)

    def started(output: str, **variables: str) -> subprocess.Popen:
        words = ["ablate", str(tmp_path / "study.toml"), "--output", str(tmp_path / output)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
        line = [sys.executable, "-m", "specdec", *words]
        return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True)

    (expected,) = (process.communicate()[0] for process in [started("one")])
    array = [started("array", SLURM_ARRAY_TASK_ID=str(i), SLURM_JOB_ID=f"7_{i}") for i in range(3)]
    assert [process.communicate()[0] for process in array] == [expected] * 3
    tasks = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    srun = [started("srun", SLURM_PROCID=str(i), SLURM_LOCALID=str(i), **tasks) for i in range(2)]
    assert [process.communicate()[0] for process in srun] == [expected] * 2
    assert [process.returncode for process in array + srun] == [0] * 5
