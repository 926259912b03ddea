"""What a correction inside the block is worth: `python benchmarks/corrections.py`.

The zoo's mask-token head against the same head without its correction, chains, held-out prompts.
The correction was trained alone, so all other weights are equal. `--control FOLDER` adds a head
that was trained as long on the same text with no correction, all its weights
(`python -m recipes.zoo.recipe correction-control` writes `control` into its `--work-dir`).

Acceptance lengths have 95 % intervals over prompts; the gain is the ratio of two heads' lengths,
its interval from prompts resampled for both alike. Milliseconds are the processor's, of `generate`
for one row, the prompt included, per step and per new token, so that other work on the machine
hardly counts. Heads take turns; the median over rounds.
"""

import argparse
import time

import numpy as np
import torch

from specdec import MaskTokenDrafter, SpeculativeGenerator, zoo
from specdec.evaluation.evaluate import evaluate
from specdec.evaluation.intervals import bootstrap
from specdec.results import SpeculationStats
from specdec.training.mask_token import with_correction


def totals(evaluation) -> dict:
    """Steps and accepted tokens of each prompt."""
    found = {}
    for row in evaluation.rows:
        stats = SpeculationStats([row.steps], evaluation.num_draft_tokens)
        found.setdefault(row.prompt, []).append((stats.steps[0], stats.accepted[0]))
    return {prompt: np.sum(rows, axis=0) for prompt, rows in found.items()}


def gain(ours, plain):
    """Acceptance length of one head / that of another."""
    ours, plain = totals(ours), totals(plain)
    rows = [[*ours[prompt], *plain[prompt]] for prompt in plain]

    def ratio(sums):
        above, below = (1 + sums[..., i + 1 : i + 2] / sums[..., i : i + 1] for i in (0, 2))
        return above / below

    return bootstrap(rows, ratio, unit="prompt")[0]


def cpu_ms(ways, inputs, rounds: int, **options) -> dict[str, tuple[float, float]]:
    """Of each way: milliseconds of the processor per step and per new token."""
    found = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            steps, tokens, start = 0, 0, time.process_time()
            for number, ids in enumerate(inputs):
                result = way.generate(ids, seed=number, **options)
                steps += sum(result.stats.steps)
                tokens += sum(result.lengths)
            taken = 1e3 * (time.process_time() - start)
            found[name].append((taken / steps, taken / tokens))
    return {name: tuple(np.median(rows[1:], axis=0)) for name, rows in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=1, help="of each prompt, with temperature")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--k", type=int, nargs="+", default=[4, 7])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--rounds", type=int, default=5, help="of timing; 0 for none")
    parser.add_argument("--control", metavar="FOLDER", help="a plain head trained as long")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    prompts = zoo.heldout_prompts(options.prompts)
    head = zoo.load_drafter("mask-token", target).head
    heads = {"plain": with_correction(head, None), "corrected": head}
    if options.control:
        heads["control"] = MaskTokenDrafter.from_pretrained(options.control, target).head
    heads = {name: each.to(target.dtype).eval() for name, each in heads.items()}
    print(f"{options.threads} threads, {options.prompts} prompts, torch {torch.__version__}")
    print("\n| K | T | head | acceptance length | gain | ms per step | ms per token |")
    print("|---|---|---|---|---|---|---|")
    for k in options.k:
        ways = {
            name: SpeculativeGenerator(target, MaskTokenDrafter(each, target, k))
            for name, each in heads.items()
        }
        for temperature in options.temperatures:
            how = {"tokenizer": tokenizer, "max_new_tokens": options.new_tokens}
            how["temperature"] = temperature
            samples = options.samples if temperature else 1
            found = {
                name: evaluate(way, prompts, batch_size=8, samples=samples, **how)
                for name, way in ways.items()
            }
            speeds = {}
            if options.rounds:
                inputs = [tokenizer(text, return_tensors="pt").input_ids for text in prompts[:6]]
                sampling = {"do_sample": temperature > 0, "neutral": True}
                if temperature:
                    sampling["temperature"] = temperature
                sampling["max_new_tokens"] = options.new_tokens
                times = cpu_ms(ways, inputs, options.rounds, **sampling)
                speeds = {
                    name: f"{ms:.2f} | {of_token:.2f}" for name, (ms, of_token) in times.items()
                }
            for name, each in found.items():
                length = each.estimates["acceptance_length"]
                ratio = "" if name == "plain" else format(gain(each, found["plain"]), ".3f")
                row = k, f"{temperature:g}", name, format(length, ".2f"), ratio
                print(f"| {' | '.join(map(str, row))} | {speeds.get(name, ' | ')} |", flush=True)


if __name__ == "__main__":
    main()
