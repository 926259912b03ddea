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

TESTS = Path(__file__).parent.parent
PROGRAM = TESTS / "compile_kernels.py"
LAUNCHES = [
    # points, tokens, blocks
    *(["_partials_kernel", "accept_kernel", "residual_kernel", "finalize_kernel"] * 3),
    *(["_partials_kernel", "_sample_kernel"] * 2),  # with probabilities and without
    *("_heat_kernel", "_final_kernel", "_step_kernel"),
    *("_partials_kernel", "_guess_kernel", "_list_kernel", "_search_kernel"),
    "_expand_kernel",
    "_shift_kernel",
]
ATTENTION = [
    "_attend_kernel",  # rows whole
    *("_attend_kernel", "_merge_kernel"),  # rows split
    "_write_kernel",
]


def test_every_kernel_compiles_for_a_hopper_gpu(tmp_path):
    interpreted = {"TRITON_INTERPRET"}
    environment = {k: v for k, v in os.environ.items() if k not in interpreted}
    environment["PYTHONPATH"] = str(TESTS.parent)
    runs = []
    for dtype in ("bfloat16", "float32"):  # side by side: Triton compiles for half a minute
        place = {"TRITON_CACHE_DIR": str(tmp_path / dtype)}  # nothing is compiled yet
        command = [sys.executable, PROGRAM, dtype]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        runs.append(subprocess.Popen(command, env=environment | place, **pipes))
    for run in runs:
        printed, errors = run.communicate()
        assert run.returncode == 0, errors[-3000:]
        compiled = [line.split() for line in printed.splitlines()]
        assert [name for name, _ in compiled] == LAUNCHES + ATTENTION
        assert all(int(size) > 0 for _, size in compiled)
