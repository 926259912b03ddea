"""Shapes of sampled trees on the zoo: how likely a sibling is accepted, and which shape and rule
accept the most.

    python benchmarks/tree_shapes.py rates --head eagle3 --temperature 1
    python benchmarks/tree_shapes.py shapes --head eagle3 --temperature 1 --rates 0.6 0.2 0.1 0.05

`rates` measures, by recursive rejection over full trees, the chance that the k-th drawn sibling is
accepted where its parent is. `shapes` compares the accepted tokens per step of shapes and rules on
the same prompts and seeds, with bootstrap intervals over the prompts.
"""

import argparse
from collections import Counter
from itertools import product

import numpy as np

from specdec import BlockSampler, RejectionSampler, SpeculativeGenerator, Tree, zoo
from specdec.evaluation.intervals import bootstrap

RULES = {"recursive": RejectionSampler, "traversal": BlockSampler}


def full(siblings: int, depth: int) -> Tree:
    """Every node above the last depth has as many children."""
    nodes = sum(siblings**d for d in range(1, depth + 1))
    parents = tuple(node // siblings - 1 for node in range(nodes))
    return Tree(nodes, depth, top_k=nodes, parents=parents)


def delayed(nodes: int, depth: int, rates: tuple[float, ...], late: int) -> Tree:
    """A chain of `late` nodes, and at its end the shape of the rates."""
    rest = Tree(nodes - late, depth - late, rates=rates).shape
    parents = (*range(-1, late - 1), *(late + parent for parent in rest))
    return Tree(nodes, depth, parents=parents)


def rows_of(head: str, tree: Tree, rule: str, options: argparse.Namespace, tables) -> list[list]:
    """Steps of each prompt."""
    target, tokenizer = tables
    generator = SpeculativeGenerator(
        target, zoo.load_drafter(head, target, tree=tree), RULES[rule]()
    )
    last, rows = options.first_prompt + options.prompts, []
    prompts = zoo.heldout_prompts(last)
    for first in range(options.first_prompt, last, 8):
        batch = prompts[first : first + 8]
        inputs = tokenizer(batch, return_tensors="pt", padding=True, padding_side="left")
        result = generator.generate(
            **inputs,
            max_new_tokens=options.max_new_tokens,
            do_sample=True,
            temperature=options.temperature,
            top_k=0,
            seed=[1000 + first + row for row in range(len(batch))],
        )
        rows += result.steps
    return rows


def print_rates(options: argparse.Namespace, tables) -> None:
    tree, tried, accepted = full(options.siblings, options.depth), Counter(), Counter()
    for steps in rows_of(options.head, tree, "recursive", options, tables):
        for step in (step for step in steps if step.draft_tokens):
            for depth, parent in enumerate([-1, *step.path]):
                for rank, child in enumerate(step.children_of(parent)):
                    tried[depth, rank] += 1
                    if child in step.path:
                        accepted[depth, rank] += 1
                        break
    print(f"{options.head}, T = {options.temperature}: k-th sibling, if elder ones are not (tries)")
    every = range(options.depth)
    for name, depths in [("all", every), *((f"depth {d + 1}", [d]) for d in every)]:
        shares, left, rates = [], 1.0, []
        for rank in range(options.siblings):
            count, hits = (sum(c[d, rank] for d in depths) for c in (tried, accepted))
            share = hits / max(count, 1)
            shares.append(f"{share:.3f} ({count})")
            rates.append(left * share)
            left *= 1 - share
        print(f"{name:<8}", *shares, "| rates", *(f"{rate:.3f}" for rate in rates), flush=True)


def print_shapes(options: argparse.Namespace, tables) -> None:
    nodes, depth = options.nodes, options.depth
    shapes = {"default": Tree(nodes, depth)}
    if options.rates:
        shapes["given rates"] = Tree(nodes, depth, rates=tuple(options.rates))
    rates = tuple(options.rates or Tree.rates)
    for late in options.late:
        shapes[f"delayed by {late}"] = delayed(nodes, depth, rates, late)
    totals = {}
    for (name, tree), rule in product(shapes.items(), options.rules):
        rows = rows_of(options.head, tree, rule, options, tables)
        counts = [[sum(s.num_accepted for s in steps), len(steps)] for steps in rows]
        totals[name, rule] = np.array(counts, dtype=float)
    print(f"{options.head}, T = {options.temperature}, {nodes} nodes, depth {depth}: accepted/step")
    for (name, rule), own in totals.items():
        table = [own, totals["default", options.rules[-1]], totals[name, options.rules[0]]]
        value, of_default, of_rule = bootstrap(np.concatenate(table, axis=1), figures)
        print(
            f"{name:<13}{rule:<11}{value:.3f}  / default shape {of_default:.3f}"
            f"  / {options.rules[0]} {of_rule:.3f}  ({own[:, 1].sum():.0f} steps)",
            flush=True,
        )


def figures(sums: np.ndarray) -> np.ndarray:
    """Accepted tokens per step, and their ratios to those of the two others."""
    per_step = sums[..., 0::2] / sums[..., 1::2]
    own, others = per_step[..., :1], per_step[..., 1:]
    return np.concatenate([own, own / others], axis=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("rates", "shapes"))
    parser.add_argument("--head", default="eagle3", help="or mask-token, model")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--first-prompt", type=int, default=0, help="leave out those before")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--nodes", type=int, default=32, help="of the shapes")
    parser.add_argument("--depth", type=int, help="6 of the shapes, 2 of the trees of rates")
    parser.add_argument("--siblings", type=int, default=8, help="of the trees of rates")
    parser.add_argument("--rates", type=float, nargs="+", help="to compare with the default ones")
    parser.add_argument("--late", type=int, nargs="*", default=[1, 2], help="depths of delay")
    parser.add_argument("--rules", nargs="+", choices=tuple(RULES), default=list(RULES))
    options = parser.parse_args()
    options.depth = options.depth or {"rates": 2, "shapes": 6}[options.what]
    tables = zoo.load_target(), zoo.load_tokenizer()
    {"rates": print_rates, "shapes": print_shapes}[options.what](options, tables)


if __name__ == "__main__":
    main()
