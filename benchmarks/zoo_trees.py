"""Trees beside chains on the zoo: acceptance length and tokens per second, in turn.

    python benchmarks/zoo_trees.py

Real acceptance: trained heads, held-out prompts, the whole of `generate`.
"""

import argparse
import time

from specdec import SpeculativeGenerator, Tree, zoo
from specdec.results import SpeculationStats

SHAPES = {f"chain, K = {k}": {"num_draft_tokens": k} for k in (2, 3, 4, 5, 6)} | {
    f"tree, M = {nodes}, D = {depth}": {"tree": Tree(nodes, depth, top_k)}
    for nodes, depth, top_k in ((8, 4, 4), (16, 5, 6), (32, 6, 8), (63, 6, 10))
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=24, help="a third of them where B is 1")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args()
    target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    prompts = zoo.heldout_prompts(options.prompts)
    print(f"{'head':<12}{'T':>5}{'B':>4}  {'draft':<18}{'acceptance length':>18}{'tokens/s':>10}")
    for head in ("eagle3", "mask-token"):
        generators = {
            name: SpeculativeGenerator(target, zoo.load_drafter(head, target, **shape))
            for name, shape in SHAPES.items()
        }
        for temperature in (0.0, 0.6, 1.0):
            for rows, texts in ((1, prompts[: len(prompts) // 3]), (8, prompts)):
                batches = [texts[i : i + rows] for i in range(0, len(texts), rows)]
                stats = {name: [] for name in generators}
                for number, batch in enumerate(batches):
                    inputs = tokenizer(
                        batch, return_tensors="pt", padding=True, padding_side="left"
                    )
                    sampling = {"do_sample": False}
                    if temperature:
                        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
                        sampling["seed"] = [1000 * number + row for row in range(len(batch))]
                    for name, generator in generators.items():
                        stats[name].append(timed(generator, inputs, options, sampling))
                for name, found in stats.items():
                    whole = sum(found)
                    print(
                        f"{head:<12}{temperature:>5}{rows:>4}  {name:<18}"
                        f"{whole.acceptance_length:>18.2f}{whole.tokens_per_s:>10.0f}",
                        flush=True,
                    )


def timed(generator, inputs, options, sampling) -> SpeculationStats:
    """Counts of one call, with the seconds that it took."""
    start = time.perf_counter()
    stats = generator.generate(**inputs, max_new_tokens=options.max_new_tokens, **sampling).stats
    stats.wall_s = time.perf_counter() - start
    return stats


if __name__ == "__main__":
    main()
