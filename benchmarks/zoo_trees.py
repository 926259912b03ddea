"""Trees beside chains on the zoo: acceptance length and time, in turn.

    PYTHONPATH=. python benchmarks/zoo_trees.py

Real acceptance: trained heads, held-out prompts, the whole of `generate`.
"""

import argparse

import torch
from timing import Side, Turns, about, show, timed

from specdec import SpeculativeGenerator, Tree, zoo

SHAPES = {f"chain, K = {k}": {"num_draft_tokens": k} for k in (4, 2, 6)} | {
    f"tree, M = {nodes}, D = {depth}": {"tree": Tree(nodes, depth, top_k)}
    for nodes, depth, top_k in ((8, 4, 4), (16, 5, 6), (32, 6, 8), (63, 6, 10))
}


def side_of(generator: SpeculativeGenerator, batches: list, options: dict, found: list) -> Side:
    """Milliseconds per new token; the counts of the last round are left in `found`."""

    def run() -> object:
        results = []
        for number, inputs in enumerate(batches):
            rows = range(1000 * number, 1000 * number + len(inputs["input_ids"]))
            seeds = {"seed": list(rows)} if options["do_sample"] else {}
            results.append(generator.generate(**inputs, **options, **seeds).stats)
        return sum(results)

    def side() -> float:
        ms, stats = timed(run)
        found[:] = [stats]
        return ms / sum(stats.emitted)

    return side


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=24, help="a third of them where B is 1")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    prompts, padded = zoo.heldout_prompts(args.prompts), {"padding": True, "padding_side": "left"}
    print(f"{about()}; x: times as fast as the chain of 4\n")
    lines = []
    for head in ("eagle3", "mask-token"):
        drafters = {name: zoo.load_drafter(head, target, **size) for name, size in SHAPES.items()}
        generators = {name: SpeculativeGenerator(target, d) for name, d in drafters.items()}
        for temperature in (0.0, 1.0):
            options = {
                "max_new_tokens": args.new_tokens,
                "do_sample": temperature > 0,
                "neutral": True,
            }
            for rows, texts in ((1, prompts[: len(prompts) // 3]), (8, prompts)):
                chunks = (texts[i : i + rows] for i in range(0, len(texts), rows))
                batches = [tokenizer(chunk, return_tensors="pt", **padded) for chunk in chunks]
                found = {name: [] for name in generators}
                sides = {n: side_of(g, batches, options, found[n]) for n, g in generators.items()}
                times, first = Turns().run(sides, args.rounds), next(iter(sides))
                for name, (stats,) in found.items():
                    length, faster = stats.acceptance_length, times.ratio(first, name)
                    lines.append([head, temperature, rows, name, f"{length:.2f}", f"{faster:.2f}"])
    show("head|T|B|draft|acceptance length|x", lines)


if __name__ == "__main__":
    main()
