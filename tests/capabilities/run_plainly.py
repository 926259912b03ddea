"""Runs a short suite as on a processor that rounds otherwise, with one thread and with two.

    python tests/capabilities/run_plainly.py                          # the files of suite.txt
    python tests/capabilities/run_plainly.py tests/graphs tests/loop  # others

Matrix products of MKL take the one path that all processors have, kernels of ATen and oneDNN use no
wide instructions. A test that holds the rounding of one processor for a law fails here.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUITE = Path(__file__).parent / "suite.txt"
PLAIN = {
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}


def main(files: list[str]) -> int:
    """As on the command line; 1 where a test fails."""
    is_green = True
    for threads in ("1", "2"):
        counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads)
        environment = {**os.environ, **PLAIN, **counts}
        workers = ["-n", "2", "--dist", "loadfile"] if threads == "1" else []
        command = [sys.executable, "-m", "pytest", *workers, *(files or [f"@{SUITE}"])]
        started = time.monotonic()
        done = subprocess.run(command, env=environment, cwd=ROOT)
        is_green &= done.returncode == 0
        result = "passed" if done.returncode == 0 else "failed"
        print(f"{threads} threads: {result} in {time.monotonic() - started:.0f} s", flush=True)
    return 0 if is_green else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
