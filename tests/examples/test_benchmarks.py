"""Benchmarks of a GPU run on a CPU from end to end, with small shapes."""

import os
import subprocess
import sys

import pytest

COMMANDS = ["gpu.py", "gpu_check.py", "gpu_kernels.py --rounds 1 --batch 1"]
COMMANDS += ["gpu_attention.py --rounds 1", "training.py --rounds 1", "self_drafting.py"]
COMMANDS += ["gpu_first.py"]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_it_runs(command, pytestconfig):
    env = {**os.environ, "PYTHONPATH": ".", "CUDA_VISIBLE_DEVICES": ""}
    program = [sys.executable, *f"benchmarks/{command}".split()]
    where = {"cwd": pytestconfig.rootpath, "env": env}
    found = subprocess.run(program, **where, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
