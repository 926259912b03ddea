"""Captured steps under tensor parallelism, in two processes that end: over gloo with the identity
capture of a CPU, and on two GPUs (`python -m pytest -m gpu tests/parallel`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, build

ROOT = Path(__file__).parents[2]
LIMIT_S = 300
TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def run(folder: Path, backend: str, ending: str) -> list[str]:
    """What both ranks printed; fails where one of them fails or does not end."""
    script = Path(__file__).with_name("captured_processes.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if backend == "gloo":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, str(script), str(folder), backend, ending]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": rank, "LOCAL_RANK": rank}, **options)
        for rank in ("0", "1")
    ]
    try:
        printed = [process.communicate(timeout=LIMIT_S)[0] for process in ranks]
    except subprocess.TimeoutExpired:
        for process in ranks:
            process.kill()
        printed = [process.communicate()[0] for process in ranks]
    codes = [process.returncode for process in ranks]  # -9 is a process that did not end
    assert codes == [0, 0], f"exit statuses {codes}\n" + "\n".join(printed)
    return printed


@pytest.mark.parametrize("ending", ["destroy", "exit"])
@pytest.mark.parametrize(
    "backend", [pytest.param("gloo", marks=pytest.mark.slow), pytest.param("nccl", marks=TWO_GPUS)]
)
def test_captured_steps_over_two_processes_equal_eager_ones_and_end(
    backend, ending, tmp_path, monkeypatch
):
    """Slow: two interpreters start."""
    family, config = ARCHITECTURES["llama"]  # with a vocabulary that two processes share equally
    monkeypatch.setitem(ARCHITECTURES, "llama", (family, {**config, "vocab_size": 64}))
    build("llama").save_pretrained(tmp_path)
    printed = run(tmp_path, backend, ending)
    reports = [json.loads((tmp_path / f"{ending}_{rank}.json").read_text()) for rank in (0, 1)]
    for report in reports:
        assert report["backend"] == backend
        for name, texts in report["texts"].items():
            assert texts["captured"] == texts["eager"], name
            assert texts["captured"] == texts["whole"], name
        assert all("captured in" in text for text in report["explain"])
        assert report["num_live"] >= len(report["texts"])
        assert report.get("num_left", 0) == 0
    assert reports[0]["texts"] == reports[1]["texts"]
    assert all("0 graphs are alive at the very end" in text for text in printed)
