"""How many tokens a certificate needs to see a fault, and what it says of sound generators.

    PYTHONPATH=. python benchmarks/certificates.py power --output power.jsonl
    PYTHONPATH=. python benchmarks/certificates.py sound --output sound.jsonl
    PYTHONPATH=. python benchmarks/certificates.py half --output half.jsonl    # on a GPU: 8B shape

Every line of the output is a finished run; what is there already is not run again. `half` writes a
line after every chunk of tokens instead, and begins anew.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from faults import FAULTS, OTHER_FAULTS, PROMPT_TOKENS, ROWS, Case, drafts
from half import half
from timing import about

from specdec import (
    BlockSampler,
    CouplingSampler,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    zoo,
)
from specdec.certify.generator.along import MOST_FAR, ON_LOOP
from specdec.certify.generator.directions import DIRECTIONS
from specdec.certify.generator.learned import Learned
from specdec.certify.generator.martingale import Wealth
from specdec.certify.generator.reading import Reader
from specdec.request.prompts import left_padded

OPTIONS = {"temperature": 1.0, "neutral": True, "eos_token_id": []}
NEW_TOKENS = 64
ROUNDING = torch.finfo(torch.float32).eps ** 0.5

RULES = {"rejection": RejectionSampler, "block": BlockSampler, "coupling": CouplingSampler}
HEADS = ("model", "eagle3", "mask-token", "mtp")


def sound_cases() -> dict[str, Case]:
    """Every drafter with every rule, chains and trees."""
    makers = {"lookup": lambda target: PromptLookupDrafter(4)}
    makers |= {name: lambda target, name=name: zoo.load_drafter(name, target) for name in HEADS}
    for name in ("model", "eagle3"):
        makers[f"{name}, tree"] = lambda target, name=name: zoo.load_drafter(
            name, target, tree="8x4"
        )
    return {
        f"{drafter}, {rule}": Case(make, RULES[rule])
        for drafter, make in makers.items()
        for rule in RULES
    }


def watch(case: Case, *, most: int, first_seed: int, threshold: float) -> dict:
    """Bets along texts until the e-value passes a threshold: with what the loop drew from, and by
    the texts alone. The curves are of logarithms.
    """
    model, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    texts = zoo.heldout_prompts(ROWS)
    prompts = [tokenizer(text).input_ids[:PROMPT_TOKENS] for text in texts]
    generator = SpeculativeGenerator(case.target(model), case.drafter(model), case.sampler())
    # The rule of the reader writes the texts' tokens; its target is the sound one.
    reader = Reader(SpeculativeGenerator(model, generator.drafter, RejectionSampler()))
    learned, options = Learned(), OPTIONS | case.options
    wealths = {
        "with the loop": Wealth(len(DIRECTIONS), last=ON_LOOP),
        "text alone": Wealth(len(DIRECTIONS), last=0.0),
    }
    reached, curves = dict.fromkeys(wealths), {name: [] for name in wealths}
    tokens, failed, sums = [], None, 0.0
    started, count, far, seed = time.perf_counter(), 0, 0, first_seed
    while count < most and None in reached.values():
        seeds = list(range(seed, seed := seed + ROWS))
        with case.around():
            result = generator.generate(
                *left_padded(prompts, generator.target.device),
                **{**options, "max_new_tokens": NEW_TOKENS, "seed": seeds, "output_scores": True},
            )
        new, first = result.new_tokens.tolist(), len(tokens) * ROWS
        read = reader.read(prompts, new, options, result.scores, learned, first)
        count += sum(result.lengths)
        far += int((read.loop_distance > ROUNDING).sum())
        tokens.append(count)
        failed = failed or (count if far > MOST_FAR * count else None)
        sums = sums + torch.stack([read.gains, read.variances]).sum(dim=(1, 2))
        for name, wealth in wealths.items():
            wealth.add(read.gains, torch.tensor(result.lengths))
            curves[name].append(round(wealth.log_e, 3))
            if reached[name] is None and wealth.log_peak > math.log(threshold):
                reached[name] = count
    z = (sums[0] / sums[1].clamp(min=1e-300).sqrt()).tolist()
    return {
        "reached": reached,
        "curves": curves,
        "tokens": tokens,
        "failed": failed,
        "z": {name: round(each, 2) for name, each in zip(DIRECTIONS, z, strict=True)},
        "seconds": round(time.perf_counter() - started, 1),
    }


def power(add: Callable, args: argparse.Namespace) -> None:
    """Every planted fault, and one sound generator for the figure."""
    cases = {"sound": Case(drafts())} | FAULTS | OTHER_FAULTS
    for name in args.only or cases:
        options = {"most": args.tokens, "first_seed": 10**6, "threshold": 1e3}
        add(name, lambda case=cases[name], options=options: watch(case, **options))


def sound(add: Callable, args: argparse.Namespace) -> None:
    """200 runs in all, over all sound generators in turn."""
    cases = sound_cases()
    for run in range(args.runs):
        name = list(cases)[run % len(cases)]
        options = {"most": args.tokens, "first_seed": 10**8 * (1 + run), "threshold": 1e2}
        add(f"{name}, run {run}", lambda case=cases[name], o=options: watch(case, **o))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=("power", "sound", "half"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, help="at most, per run (200 000; half: 40 960)")
    parser.add_argument("--runs", type=int, default=200, help="of sound generators")
    parser.add_argument("--only", nargs="*", help="faults")
    parser.add_argument("--seconds", type=float, default=240.0, help="half: at most, per run")
    args = parser.parse_args()
    print(about(), flush=True)
    if args.study == "half":
        half(args.output, args.tokens or 40_960, args.seconds)
        return
    args.tokens = args.tokens or 200_000
    done = {}
    if args.output.exists():
        lines = map(json.loads, args.output.read_text().splitlines())
        done = {line["name"]: line for line in lines}

    def add(name: str, run: Callable[[], dict]) -> None:
        if name not in done:
            done[name] = {"name": name, **run()}
            with args.output.open("a") as file:
                file.write(json.dumps(done[name]) + "\n")
        line = done[name]
        peaks = {way: max(curve) for way, curve in line["curves"].items()}
        reached = "   ".join(
            f"{way}: {count or 'not'} (log e at most {peaks[way]:.1f})"
            for way, count in line["reached"].items()
        )
        seen = f"   loop differs visibly: {line['failed']}" if line["failed"] else ""
        print(f"{name:<38} {line['tokens'][-1]:>7} tokens   {reached}{seen}", flush=True)

    {"power": power, "sound": sound}[args.study](add, args)


if __name__ == "__main__":
    main()
