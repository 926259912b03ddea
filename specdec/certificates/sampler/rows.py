"""Whether a rule decides on each row by what that row has: its draft, its logits, its numbers.

Enumeration and draws look at many rows in one batch, and a rule that treats one of them otherwise
hides among them. So a few rows are decided on again: at other places of the batch, and alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.certificates.sampler.enumeration import ExtraDraws
from specdec.certificates.sampler.paths import Decide, Paths
from specdec.certificates.sampler.problems import Problems
from specdec.types import Verdict

NUM_ROWS, NUM_SLOW_ROWS, NUM_BATCHES = 64, 12, 16
"""Rows of a batch, fewer where a rule is called row by row, and how many batches."""

SHIFTS = 1, 2, 3, 5, 8, 11, 17, 27, 40, 63
"""Each batch stands in orders that move all of its rows on by so many places, and is cut in batches
of 1, 2, 3, ... rows."""


def by_place(
    decide: Decide,
    problems: Problems,
    generator: torch.Generator,
    *,
    num_lists: int,
    draws: ExtraDraws,
    num_rows: int = NUM_ROWS,
    device: torch.device | str = "cpu",
) -> str | None:
    """What is decided otherwise at another place, after another call, or alone; `None` where
    nothing is, or where the same call says different things, as of a rule with random numbers
    besides those of its noise.

    Args:
        decide: the sampler.
        problems: whose drafts are in the batch.
        generator: draws rows and numbers.
        num_lists: races at a position that the rule decides by; 0 where it takes uniforms.
        draws: what it draws its extra token by, then.
        num_rows: of a batch.
        device: where it runs.
    """
    paths, order = Paths(problems, device=device), torch.arange(num_rows, device="cpu")
    width, vocab = problems.num_draft_tokens, problems.vocab_size
    for _ in range(NUM_BATCHES):
        picked = torch.randint(0, len(paths), (num_rows,), generator=generator, device="cpu")
        accept, extra = None, torch.zeros(0, dtype=torch.float64, device="cpu")
        if num_lists:
            shape = num_rows, num_lists, width + 1, vocab
            extra = extra.new_empty(shape).exponential_(generator=generator)
        else:
            accept = extra.new_empty(num_rows, width).uniform_(generator=generator)
            extra = draws.random(num_rows, vocab, generator)

        def of(rows: Tensor, picked=picked, accept=accept, extra=extra) -> Verdict:
            run = paths.runner(decide, picked[rows])
            return run(None if accept is None else accept[rows], extra[rows])

        first = of(order)
        if not _are_same(of(order), first, order):
            return None
        moved = [order.roll(places) for places in SHIFTS if places < num_rows]
        for rows in (*moved, *_cut(order)):
            if not _are_same(of(rows), first, rows):
                where = {1: "alone", num_rows: "at other places"}
                where = where.get(len(rows), f"in a batch of {len(rows)}")
                return (
                    f"with the same drafts, logits and numbers, rows of a batch of {num_rows} have "
                    f"other verdicts {where} ({problems.describe(int(paths.problem[picked[0]]))})"
                )
    return None


def _cut(order: Tensor) -> list[Tensor]:
    """Batches of 1, 2, 3, ... rows, and one of what remains."""
    sizes = []
    while sum(sizes) + len(sizes) + 1 <= len(order):
        sizes.append(len(sizes) + 1)
    rest = len(order) - sum(sizes)
    return list(order.split([*sizes, rest] if rest else sizes))


def _are_same(found: Verdict, first: Verdict, order: Tensor) -> bool:
    return found.num_accepted.equal(first.num_accepted[order]) and found.tokens.equal(
        first.tokens[order]
    )
