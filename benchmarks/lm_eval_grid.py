"""Seconds of three tasks of lm-eval on the zoo, `hf` beside `specdec-hf` with EAGLE-3, in batches
of 1, 4 and 16, by one process and by two.

    PYTHONPATH=. python benchmarks/lm_eval_grid.py
    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/lm_eval_grid.py

Timed is the models' `generate_until`, with the requests that lm-eval has built and shared out, by
the clock of each process's only thread; the slowest process counts. Start-up and waiting do not
count. Answers must be identical in every round, which is checked.
"""

import argparse
import logging

import torch
from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from timing import Side, Turns, about, show, timed
from torch import distributed

from specdec import processes, zoo
from specdec.lab.integrations.lm_eval import model_type

UNTIL = {
    r'`"\n"`': ["\n"],
    r'`"\n\n"`, `"return"`, `"):"`': ["\n\n", "return", "):"],
    "one that is never met": ["never written by this model"],
}
"""Stop sequences of each task, by what the table calls them."""

BATCHES = 1, 4, 16
OWN_TASKS = TaskManager(include_defaults=False)  # an index of lm-eval's takes 20 s a call


def task_of(until: list[str], prompts: list[str], new_tokens: int) -> dict:
    """A task as lm-eval's files describe it."""
    rows = Dataset.from_dict({"text": prompts})
    return {
        "task": f"until {until}",
        "custom_dataset": lambda **_: {"test": rows},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{text}}\n",
        "doc_to_target": "pass",
        "generation_kwargs": {"until": until, "max_gen_toks": new_tokens, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }


def run(lm: HFLM, task: dict) -> tuple[float, dict[int, str]]:
    """Milliseconds of the slowest process, and in the first one the answer to each document."""
    taken_ms, plain = 0.0, lm.generate_until

    def clocked(*args, **kwargs):
        nonlocal taken_ms
        taken_ms, answers = timed(lambda: plain(*args, **kwargs, disable_tqdm=True))
        return answers

    lm.generate_until = clocked
    found = simple_evaluate(lm, tasks=[task], task_manager=OWN_TASKS, bootstrap_iters=0)
    del lm.generate_until
    slowest_ms = torch.tensor(taken_ms)
    if distributed.is_initialized():
        distributed.all_reduce(slowest_ms, op=distributed.ReduceOp.MAX)
    rows = found["samples"][task["task"]] if found is not None else []
    return slowest_ms.item(), {row["doc_id"]: row["resps"][0][0] for row in rows}


def compare(models: dict[str, HFLM], task: dict, batch_size: int, rounds: int) -> str:
    """A cell of the table: seconds of each model, and the ratio of them."""
    answers = {}

    def side_of(name: str, lm: HFLM) -> Side:
        def side() -> float:
            lm.batch_size_per_gpu = batch_size
            taken_ms, answers[name] = run(lm, task)
            if answers[name] != answers["hf"]:
                raise SystemExit(f"{task['task']} in batches of {batch_size}: answers differ")
            return taken_ms

        return side

    times = Turns().run({name: side_of(name, lm) for name, lm in models.items()}, rounds)
    seconds = ", ".join(f"{times.ms(name) / 1e3:.2f}" for name in models)
    return f"{seconds} ({times.ratio(*models):.2f} x)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    team = processes.team()  # before lm-eval's, which on CPUs is of one process
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    loaded = {"pretrained": str(zoo.WEIGHTS_DIR / "target"), "dtype": "float32", "device": "cpu"}
    models = {"hf": HFLM(**loaded), "specdec-hf": model_type()(drafter="zoo:eagle3", **loaded)}
    prompts = zoo.heldout_prompts(args.prompts)
    tasks = {shown: task_of(until, prompts, args.new_tokens) for shown, until in UNTIL.items()}
    rows = [
        [shown, *(compare(models, task, batch, args.rounds) for batch in BATCHES)]
        for shown, task in tasks.items()
    ]
    if team.is_first:
        print(f"{about()}, processes: {team.count}; seconds of {' and '.join(models)} for ", end="")
        print(f"{args.prompts} prompts and up to {args.new_tokens} new tokens, equal answers\n")
        show("|".join(["stop sequences", *(f"batch {batch}" for batch in BATCHES)]), rows)


if __name__ == "__main__":
    main()
