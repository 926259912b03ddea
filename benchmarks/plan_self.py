"""With what a target drafts for itself: which layers it leaves out, how much of the text it sees.

    PYTHONPATH=. python benchmarks/plan_self.py layers --target PATH --prompts FILE
    PYTHONPATH=. python benchmarks/plan_self.py caches --target PATH --prompts FILE \\
        --draft-caches 256 1024 4096 --contexts 4096 32768 --batch-sizes 1 8

The target writes texts once; what each way of drafting would accept at every token of them is
replayed, and what its steps take is timed. Prompts should be about as long as the contexts:
acceptance is that of these texts at every context, and only times are those of the context.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from examples.replay import every_position
from examples.replay import replay as replayed
from specdec import SelfDrafter, SpeculativeGenerator, Target
from specdec.drafters.visible import draft_cache
from specdec.lab.evaluation import costs, measure_costs, own_prompts, read_prompts
from specdec.lab.evaluation.costs import CostCurve
from specdec.lab.evaluation.prompts import encode
from specdec.lab.trace import Trace
from specdec.loading import load_target
from specdec.request.lists import left_padded
from specdec.samplers import BlockSampler

PATIENCE = 3
"""A search ends after so many sets of layers that are no faster than the best one."""
ROWS = 8
"""Prompts that are read together, at most."""


class Choice(NamedTuple):
    """Layers that run, or slots that a draft sees; K; the predicted speed over plain decoding."""

    what: Any
    num_draft_tokens: int
    speedup: float


class Texts:
    """Greedy texts of a target after prompts of ids, to be replayed with up to K draft tokens."""

    def __init__(
        self, target: Target, prompts: Sequence[Sequence[int]], most: int, max_new_tokens: int = 64
    ):
        self.target, self.most = target, most
        starts = range(0, len(prompts), ROWS)
        self.batches = [left_padded(prompts[i : i + ROWS], target.device) for i in starts]
        plainly = SpeculativeGenerator(target, None)
        options = {"max_new_tokens": max_new_tokens, "neutral": True, "trace": True}
        self.traces = [plainly.generate(*ids, **options).trace for ids in self.batches]

    def generator(self, **options: Any) -> SpeculativeGenerator:
        """The target with itself as a drafter."""
        drafter = SelfDrafter(self.target, self.most, **options)
        return SpeculativeGenerator(self.target, drafter)

    def read(self, generator: SpeculativeGenerator) -> list[Trace]:
        """The texts with what a drafter makes of every token."""
        return [every_position(generator, trace) for trace in self.traces]

    def costs(self, generator: SpeculativeGenerator, rounds: int) -> CostCurve:
        """Of steps with 0..K tokens after the first of these prompts."""
        lengths = range(self.most + 1)
        return measure_costs(generator, *self.batches[0], draft_lengths=lengths, rounds=rounds)

    def best(self, what: Any, read: list[Trace], curve: CostCurve) -> Choice:
        """The fastest K, and its speed over plain decoding."""
        found = []
        for k in range(1, self.most + 1):
            one = replayed(read, num_draft_tokens=k, sampler=BlockSampler())
            found.append(Choice(what, k, float(one.speedup(curve).value)))
        return max(found, key=lambda choice: choice.speedup)


def choose_layers(texts: Texts, *, rounds: int = 5) -> Choice:
    """Finds a set of layers by measured acceptance per cost: first each layer is left out alone,
    then they are left out together, one more each time, beginning with the one that is missed the
    least. Steps of all and of half of the layers are timed; others are on the line through them.

    Reference: SWIFT, arXiv:2410.06916, which searches by the tokens that agree.
    """
    total = texts.target.num_layers
    curves = [
        texts.costs(texts.generator(layers=tuple(range(n))), rounds) for n in (total, total // 2)
    ]
    full, half = (np.array([each.plain_ms, *each.step_ms.values()]) for each in curves)

    def without(left_out: Sequence[int]) -> Choice:
        layers = tuple(i for i in range(total) if i not in left_out)
        share = (total - len(layers)) / (total - total // 2)
        ms = np.maximum(full + share * (half - full), 1e-6).tolist()
        curve = CostCurve(full[0].tolist(), dict(enumerate(ms[1:])))
        return texts.best(layers, texts.read(texts.generator(layers=layers)), curve)

    alone = [without([i]) for i in range(total)]
    order = sorted(range(total), key=lambda i: -alone[i].speedup)
    best, waited = alone[order[0]], 0
    for count in range(2, total):
        choice = without(order[:count])
        waited = 0 if choice.speedup > best.speedup else waited + 1
        best = max(best, choice, key=lambda one: one.speedup)
        if waited == PATIENCE:
            break
    return best


def choose_caches(
    texts: Texts, draft_caches: Iterable[int], *, rounds: int = 5, **sizes: Sequence[int]
) -> dict[tuple[int, int], Choice]:
    """The fastest draft cache and K by batch size and context: `batch_sizes` and `contexts`."""
    found: dict[tuple[int, int], list[Choice]] = {}
    for count in draft_caches:
        generator = texts.generator(visible=draft_cache(count))
        read, lengths = texts.read(generator), range(texts.most + 1)
        curves = costs(generator, **sizes, draft_lengths=lengths, rounds=rounds)
        for size, curve in curves.items():
            found.setdefault(size, []).append(texts.best(count, read, curve))
    return {size: max(those, key=lambda one: one.speedup) for size, those in found.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the fastest choice, and its predicted speed over plain decoding."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=("layers", "caches"))
    parser.add_argument("--target", default="zoo", help="zoo, a folder or a Hugging Face id")
    parser.add_argument("--prompts", help="file of prompts; specdec's own by default")
    parser.add_argument("--num-draft-tokens", type=int, default=4, help="the largest K")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--draft-caches", type=int, nargs="+", default=(256, 1024, 4096))
    parser.add_argument("--contexts", type=int, nargs="+", default=(4096, 32768))
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=(1, 8))
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(argv)
    records = own_prompts() if given.prompts is None else read_prompts(given.prompts)
    model, tokenizer = load_target(given.target, device=given.device)
    ids = [encode(prompt, [], tokenizer) for prompt in records]
    texts = Texts(Target(model), ids, given.num_draft_tokens, given.max_new_tokens)
    if given.what == "layers":
        choice = choose_layers(texts, rounds=given.rounds)
        k, speed = choice.num_draft_tokens, choice.speedup
        print(f"layers={choice.what}, K = {k}: {speed:.2f} x plain decoding")
        return
    sizes = {"batch_sizes": given.batch_sizes, "contexts": given.contexts}
    found = choose_caches(texts, given.draft_caches, rounds=given.rounds, **sizes)
    for (rows, tokens), (count, k, speed) in found.items():
        print(f"{rows} x {tokens} tokens: self:{count}, K = {k}: {speed:.2f} x plain decoding")


if __name__ == "__main__":
    main()
