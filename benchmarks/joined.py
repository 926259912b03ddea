"""Drafters that join, on the zoo: `python benchmarks/joined.py --prose FILE`.

The first tables are `FirstMatch` beside its parts, on held-out code and on the prompts of a file
(`specdec.evaluation.read_prompts`). The others are `SuffixDrafter` beside `PromptLookupDrafter`
where requests repeat: each text comes several times, as it was or with lines missing at its
beginning, and what was written is remembered after every request, within the time; the first time
that a text comes is not counted. Every round begins with an empty memory. One row; contenders take
turns request by request, and figures are medians over rounds of the ratio within a round. All
contenders must write the same text: greedy, or with `--temperature` what `CouplingSampler` draws.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from specdec import (
    CouplingSampler,
    FirstMatch,
    PromptLookupDrafter,
    SpeculativeGenerator,
    SuffixDrafter,
    zoo,
)
from specdec.evaluation import read_prompts


def seconds_and_text(generator: SpeculativeGenerator, ids, options: dict, totals: list) -> tuple:
    """One request; what the drafter remembers of it is part of its time."""
    start = time.perf_counter()
    result = generator.generate(ids, eos_token_id=None, **options)
    if isinstance(generator.drafter, SuffixDrafter):
        generator.drafter.remember(result.sequences)
    totals[0] += sum(result.stats.accepted)
    totals[1] += sum(result.stats.steps)
    return time.perf_counter() - start, result.sequences.tolist()


def compare(make: dict[str, Callable], target, requests: list, rounds: int, options: dict):
    """Seconds of each contender by round, those of the first request of each text left out, and its
    acceptance length.
    """
    times = {name: [] for name in make}
    totals = {name: [0, 0] for name in make}
    for round_ in range(rounds + 1):  # the first one warms up
        sampler = CouplingSampler() if options.get("do_sample") else "auto"
        generators = {n: SpeculativeGenerator(target, new(), sampler) for n, new in make.items()}
        seconds = dict.fromkeys(make, 0.0)
        for i, texts in enumerate(requests):
            is_counted = i > 0 or len(requests) == 1
            for ids in texts:
                written = None
                for name, generator in generators.items():
                    own = totals[name] if is_counted else [0, 0]
                    taken, text = seconds_and_text(generator, ids, options, own)
                    seconds[name] += taken if is_counted else 0.0
                    if written not in (None, text):
                        raise SystemExit(f"{name}: another text")
                    written = text
        if round_:
            for name, taken in seconds.items():
                times[name].append(taken)
    return times, {name: 1 + accepted / steps for name, (accepted, steps) in totals.items()}


def show(heading: str, times: dict, lengths: dict, parts: tuple[str, ...]) -> None:
    """A line of each contender, and how its time compares with that of each part."""
    print(f"\n| {heading} | acceptance length | {' | '.join(f'x {p}' for p in parts)} |")
    print("|---|---|" + "---|" * len(parts))
    for name, own in times.items():
        pairs = [zip(times[part], own, strict=True) for part in parts]
        ratios = [statistics.median(theirs / ours for theirs, ours in pair) for pair in pairs]
        shown = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {name} | {lengths[name]:.2f} | {shown} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prose", metavar="FILE", help="prompts in JSONL")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    call = {"max_new_tokens": options.new_tokens}
    if options.temperature > 0:
        call |= {"do_sample": True, "temperature": options.temperature, "seed": 0}
    sizes = {"rounds": options.rounds, "options": call}

    def encode(texts: list[str]) -> list:
        return [tokenizer(text, return_tensors="pt").input_ids for text in texts]

    def head():
        return zoo.load_drafter("eagle3", target, num_draft_tokens=6)

    def lookup():
        return PromptLookupDrafter(8, min_ngram=4, max_ngram=4)

    code = zoo.heldout_prompts(options.prompts)
    kinds = {"code": code}
    if options.prose:
        prompts = read_prompts(options.prose)
        prompts = prompts[:: max(len(prompts) // options.prompts, 1)][: options.prompts]
        kinds["prose"] = [prompt.turns[0] for prompt in prompts]
    joined = {
        "prompt lookup, K = 8": lambda: PromptLookupDrafter(8),
        "EAGLE-3, K = 6": head,
        "FirstMatch": lambda: FirstMatch(lookup(), head()),
    }
    print(f"T = {options.temperature}, {options.threads} threads, torch {torch.__version__}")
    for kind, texts in kinds.items():
        found = compare(joined, target, [encode(texts)], **sizes)
        show(kind, *found, parts=tuple(joined)[:2])

    repeated = {
        "prompt lookup": lambda: PromptLookupDrafter(8),
        "SuffixDrafter": lambda: SuffixDrafter(8),
        "SuffixDrafter, max_spec_factor=1": lambda: SuffixDrafter(8, max_spec_factor=1),
    }
    same = [encode(code)] * options.repeats
    cut = [["".join(t.splitlines(True)[i:]) for t in code] for i in range(options.repeats)]
    for kind, requests in (("the same", same), ("nearly the same", [encode(t) for t in cut])):
        found = compare(repeated, target, requests, **sizes)
        show(f"requests that are {kind}", *found, parts=("prompt lookup",))


if __name__ == "__main__":
    main()
