"""A study on a Ray cluster: equal tasks fill one folder, which all nodes must see.

    PYTHONPATH=. python examples/ray_study.py study.toml --tasks 64 --gpus 1

Ray starts the tasks where there is room, gives each its own GPUs, and starts a lost one again
(`max_retries`). The tasks share the study by its folder alone: which of them run, and when, has no
effect on the numbers. A task that starts after the end returns at once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ray

from specdec.lab.evaluation import Study, sweep
from specdec.lab.evaluation.sweep import read_study


def fill(study: Path, output: Path) -> None:
    """Measures what is free until the whole study is there."""
    sweep(**read_study(study), output=output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("study", type=Path, help="TOML file, as for specdec ablate")
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="of each task")
    options = parser.parse_args()
    file = options.study.resolve()
    task = ray.remote(num_gpus=options.gpus, max_retries=3)(fill)
    ray.get([task.remote(file, file.with_suffix("")) for _ in range(options.tasks)])
    print(Study.load(file.with_suffix("")))
