"""Benchmarks of a GPU run on a CPU from end to end, with small shapes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpu", "gpu_check", "gpu_kernels", "gpu_attention", "training"])
def test_it_runs(name):
    command = [sys.executable, f"benchmarks/{name}.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    assert found.stdout.count("\n") > 5
