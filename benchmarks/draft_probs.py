"""Acceptance length with and without draft laws, and by sampler, on the zoo.

    python benchmarks/draft_probs.py

Every cell generates from the same held-out prompts with the same seeds. `laws` tells the sampler
what law each draft token was drawn from; `no laws` keeps it from it (the tokens are point masses,
`draft_probs=False`); `argmax` proposes the most likely token, also a point mass. All of these are
lossless. Figures are acceptance lengths, 1 + accepted tokens per step, with the standard error over
rows. Nothing here is timed.
"""

import argparse
import math
import statistics

import torch
from tqdm import tqdm

from specdec import (
    BlockSampler,
    CouplingSampler,
    RejectionSampler,
    SpeculativeGenerator,
    TypicalSampler,
    zoo,
)

WAYS = {  # name: sampler, proposal, draft laws told
    "block, laws": (BlockSampler(), "sample", True),
    "rejection, laws": (RejectionSampler(), "sample", True),
    "rejection, no laws": (RejectionSampler(), "sample", False),
    "rejection, argmax": (RejectionSampler(), "argmax", True),
    "coupling": (CouplingSampler(), "sample", True),
    "typical (lossy)": (TypicalSampler(), "sample", True),
}


def acceptance(generator, inputs, *, temperature, new_tokens, seeds, laws) -> tuple[float, float]:
    """Acceptance length over all rows and its standard error."""
    options = {"do_sample": False}
    if temperature > 0:
        options = dict(do_sample=True, temperature=temperature, top_k=0, seed=seeds)
    result = generator.generate(
        inputs["input_ids"],
        inputs["attention_mask"],
        max_new_tokens=new_tokens,
        draft_probs=laws,
        **options,
    )
    stats = result.stats
    by_row = [1 + n / steps for n, steps in zip(stats.accepted, stats.steps, strict=True)]
    return stats.acceptance_length, statistics.stdev(by_row) / math.sqrt(len(by_row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafter", default="model", choices=tuple(zoo.DRAFTERS))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=4, help="of each prompt")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--temperatures", default="0,0.3,0.5,0.7,1,1.3,1.5,2")
    args = parser.parse_args()
    target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    prompts = zoo.heldout_prompts(args.prompts) * args.samples
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    seeds = list(range(len(prompts)))
    temperatures = [float(t) for t in args.temperatures.split(",")]
    table = {}
    with tqdm(total=len(WAYS) * len(temperatures), disable=None) as bar:
        for name, (sampler, proposal, laws) in WAYS.items():
            drafter = zoo.load_drafter(
                args.drafter,
                target,
                num_draft_tokens=args.num_draft_tokens,
                proposal=proposal,
            )
            generator = SpeculativeGenerator(target, drafter, sampler)
            for temperature in temperatures:
                table[name, temperature] = acceptance(
                    generator,
                    inputs,
                    temperature=temperature,
                    new_tokens=args.new_tokens,
                    seeds=seeds,
                    laws=laws,
                )
                bar.update()
    print(
        f"zoo, drafter {args.drafter!r}, K = {args.num_draft_tokens}, {len(prompts)} rows of "
        f"{args.new_tokens} tokens, torch {torch.__version__}"
    )
    print(f"{'temperature':<20}" + "".join(f"{t:>13g}" for t in temperatures))
    for name in WAYS:
        cells = (table[name, t] for t in temperatures)
        print(f"{name:<20}" + "".join(f"{length:>7.2f} ±{error:.2f}" for length, error in cells))


if __name__ == "__main__":
    main()
