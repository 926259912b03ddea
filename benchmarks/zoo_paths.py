"""Rules for several paths beside the block rule of a chain and traversal of trees on the zoo, with
equal numbers of draft tokens: block efficiency and time, in turn.

    PYTHONPATH=. python benchmarks/zoo_paths.py

Real acceptance: a draft model and a trained head, held-out prompts, temperature 1.
"""

import argparse

import torch
from timing import Turns, about, show
from zoo_trees import side_of

from specdec import BlockSampler, SpeculativeGenerator, Tree, zoo
from specdec.drafters import Paths
from specdec.samplers import GBVSampler, SpecTrSampler

BLOCK, GBV, SPECTR = BlockSampler(), GBVSampler(), SpecTrSampler()


def sides_of(num_paths: int, depth: int) -> dict[str, tuple]:
    """What is drafted, and the rule, by name: all of `num_paths * depth` draft tokens, and the
    chain that is as deep.
    """
    nodes, paths = num_paths * depth, {"tree": Paths(num_paths, depth)}
    return {
        f"chain of {depth}, block": ({"num_draft_tokens": depth}, BLOCK),
        f"chain of {nodes}, block": ({"num_draft_tokens": nodes}, BLOCK),
        f"tree of {nodes}, depth {depth}, traversal": ({"tree": Tree(nodes, depth)}, BLOCK),
        f"{num_paths}x{depth} paths, traversal": (paths, BLOCK),
        f"{num_paths}x{depth} paths, GBV": (paths, GBV),
        f"{num_paths}x{depth} paths, SpecTr": (paths, SPECTR),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    texts, padded = zoo.heldout_prompts(args.prompts), {"padding": True, "padding_side": "left"}
    chunks = (texts[i : i + args.rows] for i in range(0, len(texts), args.rows))
    batches = [tokenizer(chunk, return_tensors="pt", **padded) for chunk in chunks]
    options = {"max_new_tokens": args.new_tokens, "do_sample": True, "neutral": True}
    print(f"{about()}; temperature 1, {args.rows} rows\n")
    lines = []
    for head in ("model", "eagle3"):
        for shape in ((2, 3), (3, 4), (5, 5)):
            sides, found = {}, {}
            for name, (size, sampler) in sides_of(*shape).items():
                drafter, found[name] = zoo.load_drafter(head, target, **size), []
                generator = SpeculativeGenerator(target, drafter, sampler)
                sides[name] = side_of(generator, batches, options, found[name])
            times = Turns().run(sides, args.rounds)
            for name, (stats,) in found.items():
                emitted = f"{stats.block_efficiency:.2f}"
                lines.append([head, name, emitted, f"{times.ms(name):.2f}"])
    show("drafter|draft and rule|block efficiency|ms per token", lines)


if __name__ == "__main__":
    main()
