"""Benchmarks run from end to end on a CPU: those of a GPU with small shapes, those of the zoo over
few tokens.
"""

import os
import subprocess
import sys

import pytest

COMMANDS = ["gpu.py", "gpu_check.py", "gpu_kernels.py --rounds 1 --batch 1"]
COMMANDS += ["gpu_attention.py --rounds 1", "training.py --rounds 1", "self_drafting.py"]
COMMANDS += ["self_drafting.py --own", "gpu_first.py", "gpu_parallel.py", "gpu_encoders.py"]
COMMANDS += [
    "cpu_speed.py --threads 1 --rounds 1 --prompts 2 --new-tokens 8",
    "zoo_trees.py --threads 1 --rounds 1 --prompts 3 --new-tokens 2",
    "zoo_paths.py --threads 1 --rounds 1 --prompts 2 --new-tokens 2",
    "lm_eval_grid.py --rounds 1 --prompts 2 --new-tokens 4",
    "training_curves.py --minutes 0.02 --output {folder}",
    "rematch.py --steps 1 --seeds 1 --prompts 4 --losses soft_ce tv --output {folder}",
    "long_contexts.py --prompts 1 --lengths 512 1024 --temperatures 0 --output {folder}",
    "gpu_training.py --shape 8B",
    "latents.py --tokens 24 --layers 1 --rounds 1",
    "certificates.py sound --runs 1 --tokens 64 --output {folder}/sound.jsonl",
]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_it_runs(command, pytestconfig, tmp_path):
    if command.startswith("lm_eval"):
        pytest.importorskip("lm_eval")
    env = {**os.environ, "PYTHONPATH": ".", "CUDA_VISIBLE_DEVICES": ""}
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher *= command.startswith(("gpu_parallel", "gpu_training"))
    program = [sys.executable, *launcher, *f"benchmarks/{command}".format(folder=tmp_path).split()]
    where = {"cwd": pytestconfig.rootpath, "env": env}
    found = subprocess.run(program, **where, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
