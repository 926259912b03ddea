"""The Triton kernels compile for a GPU, on machines that have none.

The interpreter forgives what the compiler does not: a name that changes its type in a branch, a
tensor where a constant is wanted.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is there on Linux only")

PROGRAM = Path(__file__).with_name("compile_kernels.py")
KERNELS = [
    *(["_measure_kernel", "_settle_kernel"] * 2),  # points, tokens
    *("_clear_kernel", "_block_kernel"),
    *("_measure_kernel", "_sample_kernel"),
    *("_heat_kernel", "_final_kernel"),
    "_floor_kernel",
]


def test_every_kernel_compiles_for_a_hopper_gpu(tmp_path):
    interpreted = {"TRITON_INTERPRET"}
    environment = {k: v for k, v in os.environ.items() if k not in interpreted}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # nothing is compiled yet
    run = subprocess.run(
        [sys.executable, PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    compiled = [line.split() for line in run.stdout.splitlines()]
    assert [name for name, _ in compiled] == 2 * KERNELS
    assert all(int(size) > 0 for _, size in compiled)
