"""One reading of the zoo's own texts answers for every K and both lossless rules, as Markdown.

    python benchmarks/replays.py
    python benchmarks/replays.py --prompts spec_bench.jsonl --temperatures 0 1 --drafters eagle3

Per drafter and temperature: the expected acceptance length of both rules on the same texts; what a
step costs, in plain steps, measured in turn at one row; and the predicted speed-up over plain
decoding with the block rule.
(Prompt lookup is not here: which match it copies depends on K.)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from specdec import BlockSampler, RejectionSampler, SpeculativeGenerator, zoo
from specdec.evaluation import (
    CostCurve,
    Replay,
    Table,
    every_anchor,
    measure_costs,
    own_prompts,
    read_prompts,
    replay,
)
from specdec.trace import Trace

SHOWN_K = (2, 4, 6, 8)


def main() -> None:
    """Prints the three tables."""
    arguments = _arguments()
    target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    prompts = read_prompts(arguments.prompts) if arguments.prompts else own_prompts()
    texts = [prompt.turns[0] for prompt in prompts]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    lengths, prices, speeds = [], [], []
    for name in arguments.drafters:
        drafter = zoo.load_drafter(name, target, num_draft_tokens=max(SHOWN_K))
        generator = SpeculativeGenerator(target, drafter)
        one = tokenizer(texts[0], return_tensors="pt").input_ids
        costs = measure_costs(generator, one, rounds=arguments.rounds)
        plain, table = costs.medians(max(SHOWN_K))
        prices.append([name, *(f"{table[k] / plain:.2f}" for k in SHOWN_K)])
        for temperature in arguments.temperatures:
            sampling = {"do_sample": False}
            if temperature:
                seeds = list(range(len(texts)))
                sampling = {"do_sample": True, "temperature": temperature, "seed": seeds}
            result = generator.generate(
                **inputs,
                max_new_tokens=arguments.max_new_tokens,
                neutral=True,
                trace=True,
                **sampling,
            )
            whole = every_anchor(generator, result.trace)
            lengths += _lengths(name, temperature, whole)
            speeds.append(_speeds(name, temperature, whole, costs))
    lengths_header = ["drafter", "temperature", "rule", *(f"K = {k}" for k in SHOWN_K)]
    print(Table(lengths_header, lengths).markdown(), end="\n\n")
    print(Table(["drafter", *(f"K = {k}" for k in SHOWN_K)], prices).markdown(), end="\n\n")
    header = ["drafter", "temperature", "best K", "speed-up", "with the best K of every step"]
    print(Table(header, speeds).markdown())


def _lengths(name: str, temperature: float, whole: Trace) -> list[list[str]]:
    """Acceptance length of both rules; greedy text has one."""
    rules = {"block": BlockSampler()}
    if temperature:
        rules = {"rejection": RejectionSampler(), **rules}
    return [
        [
            name,
            f"{temperature:g}",
            rule if temperature else "either",
            *(f"{_replayed(whole, k, sampler).acceptance_length:.2f}" for k in SHOWN_K),
        ]
        for rule, sampler in rules.items()
    ]


def _speeds(name: str, temperature: float, whole: Trace, costs: CostCurve) -> list[str]:
    """The best K of the block rule, its speed-up, and the bound of every adaptive K."""
    found = [_replayed(whole, k, BlockSampler()) for k in range(1, max(SHOWN_K) + 1)]
    best = max(found, key=lambda one: one.speedup(costs).value)
    oracle = f"{found[-1].oracle_speedup(costs):.2f}"
    speedup = f"{best.speedup(costs):.2f}"
    return [name, f"{temperature:g}", str(best.num_draft_tokens), speedup, oracle]


def _replayed(whole: Trace, k: int, sampler: BlockSampler | RejectionSampler) -> Replay:
    return replay(whole, num_draft_tokens=k, sampler=sampler)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--drafters", nargs="+", choices=zoo.DRAFTERS, default=list(zoo.DRAFTERS))
    add("--temperatures", nargs="+", type=float, default=[0.0, 0.7, 1.0])
    add("--prompts", type=Path, help="JSONL file (default: specdec's own prompts)")
    add("--max-new-tokens", type=int, default=128)
    add("--rounds", type=int, default=9, help="in which step times are measured in turn")
    return parser.parse_args()


if __name__ == "__main__":
    main()
