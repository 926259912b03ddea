"""Benchmarks of a GPU run on a CPU from end to end, with small shapes."""

import os
import subprocess
import sys

import pytest

COMMANDS = ["gpu", "gpu_check", "gpu_kernels --rounds 1 --batch 1"]
COMMANDS += ["gpu_attention --rounds 1", "training --rounds 1"]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_it_runs(command, pytestconfig):
    name, *options = command.split()
    where = {"cwd": pytestconfig.rootpath, "env": {**os.environ, "PYTHONPATH": "."}}
    program = [sys.executable, f"benchmarks/{name}.py", *options]
    found = subprocess.run(program, **where, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
