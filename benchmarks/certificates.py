"""How many tokens a certificate needs to see a fault, and what it says of sound generators.

    PYTHONPATH=. python benchmarks/certificates.py power --output power.jsonl
    PYTHONPATH=. python benchmarks/certificates.py sound --output sound.jsonl
    PYTHONPATH=. python benchmarks/certificates.py level --output level.jsonl
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
from torch import Tensor
from transformers import PreTrainedModel

from specdec import (
    BlockSampler,
    CouplingSampler,
    Draft,
    NoDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    zoo,
)
from specdec.lab.certificates.generator.along import MOST_FAR, ON_LOOP
from specdec.lab.certificates.generator.alternatives import Ratios
from specdec.lab.certificates.generator.directions import DIRECTIONS, Directions
from specdec.lab.certificates.generator.learned import Learned
from specdec.lab.certificates.generator.martingale import Wealth
from specdec.lab.certificates.generator.reading import Reader
from specdec.request.lists import left_padded

OPTIONS = {"temperature": 1.0, "neutral": True, "eos_token_id": []}
NEW_TOKENS = 64
CERTIFICATES = math.log(1e6)
"""What bets must win at the `false_alarm` of certificates."""
ROUNDING = torch.finfo(torch.float32).eps ** 0.5

RULES = {"rejection": RejectionSampler, "block": BlockSampler, "coupling": CouplingSampler}
HEADS, TREES = ("model", "eagle3", "mask-token", "mtp"), ("model", "eagle3", "mask-token")


def sound_cases() -> dict[str, Case]:
    """Every drafter with every rule, chains and trees."""
    makers = {
        "lookup": lambda target: PromptLookupDrafter(4),
        "lookup, tree": lambda target: PromptLookupDrafter(6, num_continuations=2),
    }
    makers |= {name: lambda target, name=name: zoo.load_drafter(name, target) for name in HEADS}
    for name in TREES:
        makers[f"{name}, tree"] = lambda target, name=name: zoo.load_drafter(
            name, target, tree="8x4"
        )
    return {
        f"{drafter}, {rule}": Case(make, RULES[rule])
        for drafter, make in makers.items()
        for rule in RULES
    }


def watch(
    case: Case,
    *,
    most: int,
    first_seed: int,
    threshold: float,
    rows: int = ROWS,
    new_tokens: int = NEW_TOKENS,
) -> dict:
    """Bets along texts until the e-value passes a threshold: with what the loop drew from, and by
    the texts alone. The curves are of logarithms.
    """
    model, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    texts = zoo.heldout_prompts(rows)
    prompts = [tokenizer(text).input_ids[:PROMPT_TOKENS] for text in texts]
    generator = SpeculativeGenerator(case.target(model), case.drafter(model), case.sampler())
    # The rule of the reader writes the texts' tokens; its target is the sound one.
    reader = Reader(SpeculativeGenerator(model, generator.drafter, RejectionSampler()))
    learned, options = Learned(), OPTIONS | case.options
    wealths = {
        "with the loop": Wealth(len(DIRECTIONS), last=ON_LOOP, alternatives=True),
        "text alone": Wealth(len(DIRECTIONS), last=0.0, alternatives=True),
    }
    reached, curves = dict.fromkeys(wealths), {name: [] for name in wealths}
    tokens, bounds, failed, impossible, sums = [], [], None, None, 0.0
    started, count, far, seed = time.perf_counter(), 0, 0, first_seed
    while count < most and None in reached.values():
        seeds = list(range(seed, seed := seed + rows))
        with case.around():
            result = generator.generate(
                *left_padded(prompts, generator.target.device),
                **{**options, "max_new_tokens": new_tokens, "seed": seeds, "output_scores": True},
            )
        new, first = result.new_tokens.tolist(), len(tokens) * rows
        reading = reader.read(prompts, new, options, result.scores, learned, first)
        read, count = reading.gains, count + sum(result.lengths)
        impossible = impossible or (count if reading.impossible else None)
        far += int((read.loop_distance > ROUNDING).sum())
        tokens.append(count)
        if hasattr(generator.sampler, "law"):
            nats = divergence(model, generator.sampler.law, prompts, new, options)
            bounds.append(round(nats + (bounds[-1] if bounds else 0.0), 3))
        failed = failed or (count if far > MOST_FAR * count else None)
        sums = sums + torch.stack([read.gains, read.variances]).sum(dim=(1, 2))
        for name, wealth in wealths.items():
            bets = read.loop_bets if name == "with the loop" else None
            ratios = Ratios(read.ratios, read.spreads)
            wealth.add(read.gains, torch.tensor(result.lengths), bets, ratios)
            curves[name].append(round(wealth.log_e, 3))
            if reached[name] is None and wealth.log_peak > math.log(threshold):
                reached[name] = count
    z = (sums[0] / sums[1].clamp(min=1e-300).sqrt()).tolist()
    return {
        "reached": reached,
        "curves": curves,
        "bound": bounds,
        "tokens": tokens,
        "failed": failed,
        "impossible": impossible,
        "z": {name: round(each, 2) for name, each in zip(DIRECTIONS, z, strict=True)},
        "fits best": str(wealths["text alone"].alternatives.best),
        "seconds": round(time.perf_counter() - started, 1),
    }


def divergence(
    model: PreTrainedModel,
    law: Callable[[Tensor, Tensor, int], Tensor],
    prompts: list[list[int]],
    texts: list[list[int]],
    options: dict,
) -> float:
    """Nats by which texts that are drawn from another distribution differ from those of the target:
    the sum over tokens of the relative entropy. No bet wins more in the mean.
    """
    reader = Reader(SpeculativeGenerator(model, NoDrafter(), RejectionSampler()))
    rows, nats = torch.arange(len(prompts))[:, None], 0.0
    columns = [reader.distributions(prompts, texts, each) for each in (OPTIONS, options)]
    for place, ((whole, *_), (right, *_)) in enumerate(zip(*columns, strict=True)):
        faulty = law(whole, rows, place)
        is_drawn = (faulty > 0) & (right > 0)  # a token that p excludes decides anyway
        ratio = torch.where(is_drawn, faulty, 1).log() - torch.where(is_drawn, right, 1).log()
        nats += (faulty * ratio).sum().item()
    return nats


def power(add: Callable, args: argparse.Namespace) -> None:
    """Every planted fault, and one sound generator for the figure."""
    cases = {"sound": Case(drafts())} | FAULTS | OTHER_FAULTS
    for name in args.only or cases:
        options = {"most": args.tokens, "first_seed": 10**6, "threshold": 1e3}
        add(name, lambda case=cases[name], options=options: watch(case, **options))


def sound(add: Callable, args: argparse.Namespace) -> None:
    """200 runs in all, over all sound generators in turn; short texts."""
    cases, sizes = sound_cases(), {"rows": 8, "new_tokens": 16}
    for run in range(args.runs):
        name = list(cases)[run % len(cases)]
        options = {"most": args.tokens, "first_seed": 10**8 * (1 + run), "threshold": 1e2, **sizes}
        add(f"{name}, run {run}", lambda case=cases[name], o=options: watch(case, **o))


ALPHAS = (0.5, 0.2, 0.1, 0.05, 0.01)


def level(output: Path, runs: int, *, size: int = 12, batches: int = 4) -> None:
    """How often sound texts of random tables ever come to 1 / alpha. The tables depend on the last
    token, and drafts are drawn as they should be.
    """
    peaks = []
    for run in range(runs):
        rng = torch.Generator().manual_seed(run)
        logits = 2 * torch.randn(3, size, size, generator=rng, dtype=torch.float64)
        target, draft, loop = logits.softmax(dim=-1)
        wealth = Wealth(len(DIRECTIONS), last=ON_LOOP, alternatives=True)
        learned = Learned()
        for _ in range(batches):
            texts = torch.zeros(4, 1, dtype=torch.long)
            for _ in range(6):
                drawn = torch.multinomial(target[texts[:, -1]], 1, generator=rng)
                texts = torch.cat([texts, drawn], dim=1)
            prompts, new = texts[:, :1].tolist(), texts[:, 1:].tolist()
            directions, found = Directions(prompts, new, learned=learned), []
            for last in texts[:, :-1].unbind(dim=1):
                drafted = torch.multinomial(draft[last], 1, generator=rng)
                drafts = Draft(drafted, draft[last][:, None])
                step = directions.step(target[last], drafts, loop[last])
                found.append((step.gains, step.loop_bets, step.ratios, step.spreads))
            gains, bets, *ratios = (torch.stack(each, dim=1) for each in zip(*found, strict=True))
            wealth.add(gains, torch.full((4,), 6), bets, Ratios(*ratios))
        peaks.append(wealth.log_peak)
    peaks = torch.tensor(peaks)
    line = {"runs": runs, "largest log e": peaks.max().item()}
    line |= {f"{alpha}": (peaks >= -math.log(alpha)).double().mean().item() for alpha in ALPHAS}
    output.write_text(json.dumps(line) + "\n")
    print(json.dumps(line, indent=1), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=("power", "sound", "level", "half"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, help="at most, per run")
    parser.add_argument("--runs", type=int, help="sound: 200, level: 2000")
    parser.add_argument("--only", nargs="*", help="faults")
    parser.add_argument("--seconds", type=float, default=180.0, help="half: at most, per run")
    args = parser.parse_args()
    print(about(), flush=True)
    if args.study == "half":
        half(args.output, args.tokens or 40_960, args.seconds)
        return
    if args.study == "level":
        level(args.output, args.runs or 2000)
        return
    args.tokens = args.tokens or {"power": 200_000, "sound": 256}[args.study]
    args.runs = args.runs or 200
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
        if line["bound"]:
            nats, count = line["bound"][-1], line["tokens"][-1]
            fewest = math.ceil(CERTIFICATES * count / nats)
            reached += f"   at most {nats:.1f} can be won, 1e-6 takes {fewest} tokens or more"
        seen = f"   loop differs visibly: {line['failed']}" if line["failed"] else ""
        if line["impossible"]:
            seen += f"   a token of probability 0: {line['impossible']}"
        print(f"{name:<38} {line['tokens'][-1]:>7} tokens   {reached}{seen}", flush=True)

    {"power": power, "sound": sound}[args.study](add, args)


if __name__ == "__main__":
    main()
