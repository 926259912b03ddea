"""The Triton kernels compile for a GPU, on machines that have none.

The interpreter forgives what the compiler does not: a name that changes its type in a branch, a
tensor where a constant is wanted.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from diagonal import case

pytest.importorskip("triton", reason="Triton is there on Linux only")

TESTS = Path(__file__).parent.parent
PROGRAM = TESTS / "compile_kernels.py"
KERNELS = {
    *("_partials_kernel", "_accept_kernel", "_residual_kernel", "_finalize_kernel"),
    *("_sample_kernel", "_heat_kernel", "_final_kernel", "_step_kernel"),
    *("_guess_kernel", "_list_kernel", "_search_kernel"),
    *("_attend_kernel", "_merge_kernel", "_write_kernel"),
    *("_product_kernel", "_sum_kernel"),
}


def in_full(dtype):
    return pytest.param([dtype], marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "case",
    [case([["bfloat16", "checked"]], False), in_full("bfloat16"), in_full("float32")],
    ids="-".join,
)
def test_every_kernel_compiles_for_a_hopper_gpu(case, tmp_path):
    """With and without each option, up to machine code only where that is slow."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(TESTS.parent), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, PROGRAM, *case]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert {line.split()[0] for line in run.stdout.splitlines()} == KERNELS
