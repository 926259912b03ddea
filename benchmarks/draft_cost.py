"""What a proposal costs over K: `python benchmarks/draft_cost.py` prints a table in Markdown.

Sequential drafting makes K passes of its head, parallel drafting one. Both run on the zoo's target
on a CPU, greedy, one row; times are the median of the steps of one generation. Weights make no
difference to the cost, so the parallel head may be an untrained one.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from specdec import MaskTokenDrafter, SpeculativeGenerator, zoo
from specdec.drafters import Drafter
from specdec.training.mask_token import new_head

WARM_UP = 4


class Timed:
    """A drafter's `propose`, timed; restored by `stop`."""

    def __init__(self, drafter: Drafter):
        self.times_ms: list[float] = []
        self._drafter, self._propose = drafter, drafter.propose
        drafter.propose = self

    def __call__(self, *args):
        """As `Drafter.propose`."""
        start = time.perf_counter()
        draft = self._propose(*args)
        self.times_ms.append(1e3 * (time.perf_counter() - start))
        return draft

    def stop(self) -> float:
        """The median in ms, without the first steps."""
        del self._drafter.propose
        return statistics.median(self.times_ms[WARM_UP:])


def main() -> None:
    """Prints draft time per step, and the ratio to K = 2."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=120)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target, prompt = zoo.load_target(), zoo.load_tokenizer()(zoo.heldout_prompts(1))["input_ids"]
    head = new_head(target, mlp_width=1024)
    make = {
        "EAGLE-3, K passes": lambda k: zoo.load_drafter("eagle3", target, num_draft_tokens=k),
        "mask token, one pass": lambda k: MaskTokenDrafter(head, target, k),
    }
    costs: dict[str, dict[int, float]] = {name: {} for name in make}
    for k in options.k:
        for name in make:
            drafter = make[name](k)
            timed = Timed(drafter)
            SpeculativeGenerator(target, drafter).generate(
                torch.tensor(prompt), max_new_tokens=options.new_tokens, eos_token_id=None
            )
            costs[name][k] = timed.stop()
    print(f"draft time per step in ms, {options.threads} threads, torch {torch.__version__}\n")
    print(f"| drafter | {' | '.join(f'K = {k}' for k in options.k)} | largest K / K = 2 |")
    print(f"|---|{'---|' * (len(options.k) + 1)}")
    for name, cost in costs.items():
        ratio = f"{cost[max(cost)] / cost[2]:.2f}" if 2 in cost else "–"
        print(f"| {name} | {' | '.join(f'{ms:.2f}' for ms in cost.values())} | {ratio} |")


if __name__ == "__main__":
    main()
