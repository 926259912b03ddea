"""What drafting costs over K, and what it buys: `python benchmarks/draft_cost.py --plot FILE`.

Sequential drafting makes K passes of its head, parallel drafting one. Both heads of the zoo draft
for its target on a CPU, one row, greedy, on held-out prompts; they take turns. The first table is
the time of `propose`, the median over steps; the second is whole generations, the prompt included,
the median over rounds of milliseconds per new token, with the acceptance length.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from specdec import SpeculativeGenerator, zoo

NAMES = {"eagle3": "EAGLE-3, K passes", "mask-token": "mask tokens, one pass"}
WARM_UP = 2


@dataclass
class Cell:
    """What was measured of one drafter at one K."""

    propose_ms: list[float] = field(default_factory=list)
    ms_per_token: list[float] = field(default_factory=list)
    acceptance_length: float = 0.0


def run(generator: SpeculativeGenerator, prompts: list, new_tokens: int, cell: Cell) -> None:
    """One round over the prompts."""
    drafter, times_ms = generator.drafter, []
    propose = type(drafter).propose

    def timed(context, state, drawing):
        start = time.perf_counter()
        draft = propose(drafter, context, state, drawing)
        times_ms.append(1e3 * (time.perf_counter() - start))
        return draft

    drafter.propose = timed
    steps, accepted, seconds, tokens = 0, 0, 0.0, 0
    for prompt in prompts:
        start, first = time.perf_counter(), len(times_ms)
        result = generator.generate(prompt, max_new_tokens=new_tokens, eos_token_id=None)
        seconds += time.perf_counter() - start
        del times_ms[first : first + WARM_UP]
        steps += sum(result.stats.steps)
        accepted += sum(result.stats.accepted)
        tokens += new_tokens
    del drafter.propose
    cell.propose_ms.append(statistics.median(times_ms))
    cell.ms_per_token.append(1e3 * seconds / tokens)
    cell.acceptance_length = 1 + accepted / steps


def print_tables(cells: dict[str, dict[int, Cell]], heading: str) -> None:
    """Both tables, in Markdown."""
    counts = list(next(iter(cells.values())))
    line = f"|---|{'---|' * (len(counts) + 1)}"
    titles = " | ".join(f"K = {k}" for k in counts)
    print(f"{heading}\n\n| ms per proposal | {titles} | 8 / 2 |\n{line}")
    for name, row in cells.items():
        medians = {k: statistics.median(cell.propose_ms) for k, cell in row.items()}
        ratio = f"{medians[8] / medians[2]:.2f}" if {2, 8} <= set(medians) else "–"
        print(f"| {NAMES[name]} | {' | '.join(f'{m:.2f}' for m in medians.values())} | {ratio} |")
    print(f"\n| ms per token (acceptance length) | {titles} | best |\n{line}")
    for name, row in cells.items():
        medians = [statistics.median(cell.ms_per_token) for cell in row.values()]
        shown = [
            f"{ms:.2f} ({cell.acceptance_length:.2f})"
            for ms, cell in zip(medians, row.values(), strict=True)
        ]
        print(f"| {NAMES[name]} | {' | '.join(shown)} | {1e3 / min(medians):.0f} tokens/s |")


def plot(cells: dict[str, dict[int, Cell]], path: str) -> None:
    """The time of a proposal and of a token against K."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2))
    for row in cells.values():
        for ax, what in zip(axes, ("propose_ms", "ms_per_token"), strict=True):
            ax.plot(list(row), [statistics.median(getattr(c, what)) for c in row.values()], "o-")
            ax.set(xlabel="draft tokens K", ylim=(0, None))
    axes[0].set_ylabel("ms per proposal")
    axes[1].set_ylabel("ms per token")
    axes[1].legend([NAMES[name] for name in cells])
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8])
    parser.add_argument("--plot", metavar="FILE", help="needs matplotlib")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    texts = zoo.heldout_prompts(options.prompts)
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    cells = {name: {k: Cell() for k in options.k} for name in NAMES}
    generators = {
        (name, k): SpeculativeGenerator(target, zoo.load_drafter(name, target, num_draft_tokens=k))
        for name in NAMES
        for k in options.k
    }
    with tqdm(total=options.rounds * len(generators), disable=None) as bar:
        for _ in range(options.rounds):
            for (name, k), generator in generators.items():
                run(generator, prompts, options.new_tokens, cells[name][k])
                bar.update()
    print_tables(cells, f"{options.threads} threads, torch {torch.__version__}")
    if options.plot:
        plot(cells, options.plot)


if __name__ == "__main__":
    main()
