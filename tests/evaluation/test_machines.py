"""Machines that share a folder and nothing else: other process ids, host names and clocks, and file
systems without locks or links.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from specdec.lab.evaluation import Study, sweep

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
STUDY = {"drafts": [1, 2], "temperatures": [0.0, 1.0], "limit": 3, "max_new_tokens": 4}
NUM_TEXTS = 4 * 3
PATIENCE_S = 4.0
PROGRAM = """
import os, sys, time
from specdec import SpeculativeGenerator
from specdec.lab.evaluation import markers, sweep

folder, study, skew_s, pause_s, patience_s = sys.argv[1], *map(eval, sys.argv[2:])
markers.BEAT_S, markers.PATIENCE_S, markers.POLL_S = patience_s / 20, patience_s, 0.05
utime, generate = os.utime, SpeculativeGenerator.generate
os.utime = lambda path: utime(path, (time.time() + skew_s,) * 2)  # by this machine's clock

def noting(self, *args, **options):
    with open(folder + ".notes", "a") as notes:
        notes.write(f"{os.getpid()} {os.uname().nodename} {pause_s}\\n")
    time.sleep(pause_s)
    return generate(self, *args, **options)

SpeculativeGenerator.generate = noting
sweep(**study, output=folder)
"""
MACHINE = ["unshare", "--pid", "--fork", "--kill-child", "--uts", "--mount-proc", "sh", "-c"]
LIBRARY = """
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>
int flock(int file, int operation) { errno = ENOLCK; return -1; }
int lockf(int file, int operation, off_t size) { errno = ENOLCK; return -1; }
static int without_locks(int file, int operation, va_list rest) {
    switch (operation) {
    case F_SETLK: case F_SETLKW: case F_OFD_SETLK: case F_OFD_SETLKW: errno = ENOLCK; return -1;
    }
    return syscall(SYS_fcntl, file, operation, va_arg(rest, void *));
}
#define WITHOUT_LOCKS(name) int name(int file, int operation, ...) { \\
    va_list rest; va_start(rest, operation); return without_locks(file, operation, rest); }
WITHOUT_LOCKS(fcntl)
WITHOUT_LOCKS(fcntl64)
#ifndef LINKS
int link(const char *old, const char *new) { errno = EPERM; return -1; }
int linkat(int a, const char *b, int c, const char *d, int e) { errno = EPERM; return -1; }
#endif
"""
PROBE = """
import errno, fcntl, os, sys
def error_of(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
file = open(sys.argv[1], "w")
print(error_of(lambda: fcntl.flock(file, fcntl.LOCK_EX)))
print(error_of(lambda: fcntl.lockf(file, fcntl.LOCK_EX)))
print(error_of(lambda: os.link(sys.argv[1], sys.argv[1] + "-")))
"""


def started(folder: Path, *, host="", skew_s=0.0, pause_s=0.0, patience_s=PATIENCE_S, **variables):
    """A process that fills the study; as the first process of a machine of its own, if that has a
    name.
    """
    numbers = map(str, (STUDY, skew_s, pause_s, patience_s))
    line = [sys.executable, "-c", PROGRAM, str(folder), *numbers]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    if host:
        line = [*MACHINE, f'hostname {host} && exec "$@"', "sh", *line]
    return subprocess.Popen(line, env=environment)


def notes_of(folder: Path, at_least: int = 0) -> list[str]:
    """What the processes have noted: a line for each text that was begun."""
    path = folder.with_name(f"{folder.name}.notes")
    while at_least and not (path.exists() and len(path.read_text().splitlines()) >= at_least):
        time.sleep(0.01)
    return path.read_text().splitlines()


@pytest.fixture(scope="module")
def expected():
    return numbers(sweep(**STUDY))


def numbers(study: Study) -> list:
    """All that is measured, but for times."""
    return [[asdict(row) for row in run.rows] for run in study.runs]


@pytest.fixture
def _machines():
    if not shutil.which("unshare"):
        pytest.skip("there is no unshare, which makes namespaces")
    if subprocess.run([*MACHINE, "hostname a"], capture_output=True).returncode:
        pytest.skip("this user may not make namespaces of processes and host names")


@pytest.mark.usefixtures("_machines")
@pytest.mark.parametrize("hosts", [("one", "two"), ("node", "node")])
@pytest.mark.parametrize("skew_s", [-300.0, 300.0])
def test_a_living_machine_keeps_its_batch_however_slow_it_is(hosts, skew_s, expected, tmp_path):
    """Both processes have the id 1; the machines of containers may have one name, too."""
    folder = tmp_path / "study"
    slow = started(folder, host=hosts[0], skew_s=skew_s, pause_s=2.5 * PATIENCE_S)
    notes_of(folder, at_least=1)
    quick = started(folder, host=hosts[1])
    assert [slow.wait(), quick.wait()] == [0, 0]
    notes = notes_of(folder)
    assert {note.split()[0] for note in notes} == {"1"}
    assert len({note.split()[-1] for note in notes}) == 2  # both have worked
    assert len(notes) == NUM_TEXTS
    assert numbers(Study.load(folder)) == expected


@pytest.mark.usefixtures("_machines")
@pytest.mark.parametrize("hosts", [("one", "two"), ("node", "node")])
@pytest.mark.parametrize("skew_s", [-300.0, 300.0])
def test_what_a_dead_machine_had_taken_others_do(hosts, skew_s, expected, tmp_path):
    folder = tmp_path / "study"
    slow = started(folder, host=hosts[0], skew_s=skew_s, pause_s=600)
    notes_of(folder, at_least=1)
    quick = started(folder, host=hosts[1])
    notes_of(folder, at_least=2)
    slow.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    assert quick.wait() == 0
    assert time.monotonic() - killed > PATIENCE_S
    assert len(notes_of(folder)) == NUM_TEXTS + 1
    assert numbers(Study.load(folder)) == expected


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_system_without_locks_holds_a_study(has_links, expected, tmp_path):
    """A library in front of the system's own refuses all locks, and links; renaming works."""
    compiler, folder = shutil.which("cc"), tmp_path / "study"
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler, and Linux's LD_PRELOAD")
    (tmp_path / "no.c").write_text(LIBRARY)
    library = str(tmp_path / "no.so")
    options = ["-shared", "-fPIC", *["-DLINKS"] * has_links]
    subprocess.run([compiler, *options, "-o", library, str(tmp_path / "no.c")], check=True)
    probe = [sys.executable, "-c", PROBE, str(tmp_path / "probe")]
    environment = {**os.environ, "LD_PRELOAD": library}
    found = subprocess.run(probe, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["ENOLCK", "ENOLCK", str(None if has_links else "EPERM")]
    first = started(folder, pause_s=0.2, LD_PRELOAD=library)
    notes_of(folder, at_least=2)
    others = [started(folder, pause_s=0.1, LD_PRELOAD=library) for _ in range(2)]
    first.send_signal(signal.SIGKILL)
    assert [process.wait() for process in [first, *others]] == [-signal.SIGKILL, 0, 0]
    assert numbers(Study.load(folder)) == expected
    notes = Counter(note.split()[0] for note in notes_of(folder))
    assert sum(notes.values()) - NUM_TEXTS in (0, 1)  # the batch that the first one was at
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", *[".jsonl"] * 4]
