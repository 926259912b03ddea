"""Whether a rule decides on each row by what that row has: its draft, its logits, its numbers.

Enumeration and draws look at many rows in one batch, and a rule that treats one of them otherwise
hides among them. So a few rows are decided on again: among more rows, at other places of the batch,
in batches of every size, beside rows of one or two filters alone, and with their ids among others.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specdec.lab.certificates.sampler.enumeration import ExtraDraws
from specdec.lab.certificates.sampler.paths import Decide, Paths
from specdec.lab.certificates.sampler.problems import Problems
from specdec.lab.certificates.sampler.wider import Among, OutsideError
from specdec.types import Verdict

NUM_ROWS, NUM_SLOW_ROWS = 64, 12
"""Rows of a batch, fewer where a rule is called row by row."""

COPIES = 9
"""Of each row in one batch: more rows than a usual batch has."""

SIZES = (
    *(37, 64, 128, 257, 401, 512, 777, 1000, 1024, 2047, 4096, 5003, 8192, 10_007, 12_289, 16_384),
    *(20_011, 28_996, 32_000, 50_257, 65_537, 128_256, 151_936, 262_144),
)
"""Vocabularies of models, of numbers of some bits, and others."""

SPECIAL = {
    32_000: (0, 1, 2, 31_999),
    50_257: (10, 198, 220, 50_256),
    128_256: (100, 128_000, 128_001, 128_009),
    151_936: (11, 151_643, 151_644, 151_645),
    262_144: (105, 106, 107, 65_536),
}
"""Ids of these vocabularies that begin, end or part texts."""

MOST_NUMBERS = 2**17
"""Of a row's logits times rows, in a large vocabulary."""


class Companions:
    """Some rows of problems, with numbers of their own, that a rule decides on in many batches.

    Args:
        decide: the sampler.
        problems: whose drafts are in the batch.
        generator: draws rows and numbers.
        num_lists: races at a position that the rule decides by; 0 where it takes uniforms.
        draws: what it draws its extra token by, then.
        num_rows: of a batch.
        device: where it runs.
    """

    def __init__(
        self,
        decide: Decide,
        problems: Problems,
        generator: torch.Generator,
        *,
        num_lists: int,
        draws: ExtraDraws,
        num_rows: int = NUM_ROWS,
        device: torch.device | str = "cpu",
    ):
        self.decide, self.problems, self.num_rows = decide, problems, num_rows
        self.paths = Paths(problems, device=device)
        width, vocab = problems.num_draft_tokens, problems.vocab_size
        shape = (num_rows,)
        self.picked = torch.randint(0, len(self.paths), shape, generator=generator, device="cpu")
        self.accept = torch.empty(num_rows, width, dtype=torch.float64, device="cpu")
        self.accept.uniform_(generator=generator)
        self.extra = draws.random(num_rows, vocab, generator)
        if num_lists:
            shape = num_rows, num_lists, width + 1, vocab
            self.accept = None
            self.extra = self.extra.new_empty(shape).exponential_(generator=generator)

    def verdict(self, rows: Tensor, decide: Decide | None = None) -> Verdict:
        """On some of the rows."""
        run = self.paths.runner(decide or self.decide, self.picked[rows])
        return run(None if self.accept is None else self.accept[rows], self.extra[rows])

    def strays(self, number: int, *, is_thorough: bool) -> tuple[str, str] | None:
        """What is decided otherwise in other company: a kind of `KINDS` and words; `None` where
        nothing is, or where the same call says different things, as of a rule with random numbers
        besides those of its noise.

        Args:
            number: of these problems; it chooses sizes, pairs of filters and vocabularies.
            is_thorough: every second size of a batch, pairs of filters, and other vocabularies.
        """
        order = torch.arange(self.num_rows, device="cpu")
        first = self.verdict(order)
        if not _are_same(self.verdict(order), first, order):
            return None
        for rows, where in self._batches(order, number, is_thorough):
            if not _are_same(self.verdict(rows), first, rows):
                return "rows", self._says(f"rows of a batch of {len(order)}", where)
        places = self._places(number) if is_thorough else ()
        for ids, size, rows in places:
            try:
                is_same = _are_same(self.verdict(rows, Among(self.decide, ids, size)), first, rows)
            except OutsideError as error:
                return "zero", f"{error} ({self.problems.describe(0)})"
            if not is_same:
                others = f"as ids {ids.tolist()} of a vocabulary of {size}"
                return "ids", self._says(f"ids 0 to {len(ids) - 1}", others)
        return None

    def _says(self, what: str, where: str) -> str:
        problem = self.problems.describe(int(self.paths.problem[self.picked[0]]))
        return (
            f"with the same drafts, logits and numbers, {what} have other verdicts {where} "
            f"({problem})"
        )

    def _batches(
        self, order: Tensor, number: int, is_thorough: bool
    ) -> Iterator[tuple[Tensor, str]]:
        """Rows of each batch, and what it is in words."""
        yield order.repeat(COPIES), f"in a batch of {len(order) * COPIES}"
        moved, every = order, 2 if is_thorough else 16
        cuts = [number + 1, number + 7] if is_thorough else []  # all rows in such small batches
        for size in range(1 + number % every, len(order) // 2 + 1, every):
            cuts.append([size, len(order) - size])
        for cut in cuts:
            moved = moved.roll(5 + number)
            for rows in moved.split(cut):
                yield rows, "alone" if len(rows) == 1 else f"in a batch of {len(rows)}"
        for turn in range(1, 9):  # a rule may be wrong in one row, whose numbers may not show it
            yield order.roll(turn * (5 + number)), "at other places"
        of_row = [str(self.problems.options(w)) for w in self.paths.problem[self.picked].tolist()]
        filters = list(dict.fromkeys(of_row))
        for place, one in enumerate(filters):
            other = filters[(place + 1 + number) % len(filters)]
            for group in ([one], [one, other])[: 1 + is_thorough]:
                is_in = torch.tensor([each in group for each in of_row], device="cpu")
                yield order[is_in], f"where all rows have the filter {' or '.join(group)}"

    def _places(self, number: int) -> Iterator[tuple[Tensor, int, Tensor]]:
        """Ids of the problems in a larger vocabulary, its size, and rows to decide on."""
        vocab, order = self.problems.vocab_size, torch.arange(self.num_rows, device="cpu")
        for size in SIZES[(number + number // 6) % 6 :: 6]:
            rows = order[: max(MOST_NUMBERS // size // (self.problems.num_draft_tokens + 1), 2)]
            step = size // vocab
            for first in range(step) if size <= 64 else {0, (7 * number + 3) % step, step - 1}:
                yield torch.arange(vocab, device="cpu") * step + first, size, rows
            if size in SPECIAL:
                yield torch.tensor(SPECIAL[size], device="cpu")[-vocab:], size, rows


def _are_same(found: Verdict, first: Verdict, order: Tensor) -> bool:
    return found.num_accepted.equal(first.num_accepted[order]) and found.tokens.equal(
        first.tokens[order]
    )
