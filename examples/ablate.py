"""A grid of drafter x K x temperature x sampler x proposal: one run of `evaluate` per cell.

    python examples/ablate.py --drafters zoo:model zoo:eagle3 lookup --output grid
    python examples/ablate.py --proposals sample argmax --draft-temperatures 0.7 1 --output grid
    python examples/ablate.py --drafters mine:SuffixDrafter zoo:model --output grid
    accelerate launch --num_processes 2 examples/ablate.py ... --output grid
    python benchmarks/grid.py grid

`mine:SuffixDrafter` is a drafter of your own: a function or class in `mine.py` of the working
folder that makes one of (target, num_draft_tokens). Proposals and draft temperatures are of
drafters with probabilities, and of temperatures above 0; the others have one cell for them all.

Every cell has a file in the folder `--output`, so an interrupted grid goes on where it stopped, and
a file that was measured with other settings is refused. Processes, started by `accelerate launch`
or `torchrun`, share the prompts of every cell and write files of their own. Seeds belong to
prompts, so texts do not depend on the number of processes.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from urllib.parse import quote

import torch

from specdec import BlockSampler, CouplingSampler, RejectionSampler, SpeculativeGenerator
from specdec.evaluation import evaluate, own_prompts, read_prompts
from specdec.loading import load_drafter, load_target

SAMPLERS = {"block": BlockSampler, "rejection": RejectionSampler, "coupling": CouplingSampler}


def main() -> None:
    """Runs what is missing of every cell."""
    arguments = _arguments()
    rank, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    has_gpu = torch.cuda.is_available()
    place = {"dtype": "auto", "device": f"cuda:{os.environ.get('LOCAL_RANK', 0)}"}
    place = place if has_gpu else {**place, "device": "cpu"}
    prompts = read_prompts(arguments.prompts) if arguments.prompts else own_prompts()
    target, tokenizer = load_target(arguments.target, **place)
    shared = target  # its self-test is needed once
    for name, k, temperature, sampler, proposal in _cells(arguments):
        drafter = load_drafter(name, target, k, **place, tokenizer=tokenizer, **proposal)
        generator = SpeculativeGenerator(shared, drafter, SAMPLERS[sampler]())
        shared = generator.target
        folder = arguments.output / quote(name, safe=":")
        folder.mkdir(parents=True, exist_ok=True)
        rule = "+".join([sampler, *(f"{key}={value}" for key, value in proposal.items())])
        evaluation = evaluate(
            generator,
            prompts[: arguments.limit],
            tokenizer=tokenizer,
            max_new_tokens=arguments.max_new_tokens,
            max_prompt_tokens=arguments.max_prompt_tokens,
            temperature=temperature,
            samples=arguments.samples if temperature else 1,
            seed=arguments.seed,
            batch_size=arguments.batch_size,
            shard=(rank, count),
            output=folder / f"{k}-{temperature:g}-{rule}.{rank}-of-{count}.jsonl",
        )
        length = evaluation.estimates["acceptance_length"]
        print(f"{name}, K = {k}, temperature {temperature:g}, {rule}: {length}", flush=True)


def _cells(arguments: argparse.Namespace) -> list[tuple[str, int, float, str, dict]]:
    """The grid; at temperature 0 all samplers and proposals are one rule, which is run once."""
    proposals = [{"proposal": kind} for kind in arguments.proposals if kind != "sample"]
    if "sample" in arguments.proposals:
        temperatures = arguments.draft_temperatures
        proposals = [{"draft_temperature": t} for t in temperatures] + proposals
        proposals = ([] if temperatures else [{}]) + proposals
    return [
        (name, k, temperature, sampler, proposal)
        for name in arguments.drafters
        for k in arguments.num_draft_tokens
        for temperature in arguments.temperatures
        for sampler in arguments.samplers[: None if temperature else 1]
        for proposal in (proposals if temperature and _has_probs(name) else [{}])
    ]


def _is_own(name: str) -> bool:
    kind, is_named, _ = name.partition(":")
    return (
        bool(is_named)
        and kind.replace(".", "").isidentifier()
        and kind not in ("eagle", "mtp", "zoo")
    )


def _has_probs(name: str) -> bool:
    return name not in ("lookup", "none") and not _is_own(name)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    several = {"nargs": "+"}
    add("--target", default="zoo", help="folder or Hugging Face id (default: the zoo's)")
    add("--drafters", **several, default=["zoo:model", "zoo:eagle3", "lookup"])
    add("--num-draft-tokens", **several, type=int, default=[2, 4, 6], help="K (default: 2 4 6)")
    add("--temperatures", **several, type=float, default=[0.0, 1.0], help="(default: 0 1)")
    add("--samplers", **several, choices=SAMPLERS, default=["block", "rejection"])
    add("--proposals", **several, choices=("sample", "argmax"), default=["sample"])
    add("--draft-temperatures", **several, type=float, default=[], help="(default: the target's)")
    add("--prompts", type=Path, help="JSONL file (default: specdec's own prompts)")
    add("--limit", type=int, help="take so many first prompts (default: all)")
    add("--max-new-tokens", type=int, default=128, help="of each turn (default: 128)")
    add("--max-prompt-tokens", type=int, help="cut longer prompts on the left (default: no)")
    add("--batch-size", type=int, default=8, help="prompts at a time (default: 8)")
    add("--samples", type=int, default=1, help="texts per prompt above temperature 0 (default: 1)")
    add("--seed", type=int, default=0, help="of the first prompt (default: 0)")
    add("--output", type=Path, required=True, help="folder of the runs, a file per cell")
    return parser.parse_args()


if __name__ == "__main__":
    sys.path.insert(0, "")  # drafters of the working folder, as with `python -m`
    main()
