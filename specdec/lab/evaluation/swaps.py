"""Whether two runs over the same prompts differ, by a test that assumes nothing of their numbers:
where they are equal, the labels of both may be swapped within every prompt.

Legend: n prompts, S swaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from specdec.lab.evaluation.cells import FIGURES, Cell, axes_of, called
from specdec.lab.evaluation.intervals import Estimate, ratio
from specdec.lab.show.table import Table, Tabular

MOST_EXACT = 16
"""Prompts whose 2^n swaps are all tried."""
NUM_DRAWN = 99_999
"""Swaps that are drawn for more prompts."""
_CHUNK = 2**14


@dataclass(frozen=True)
class PairedTest:
    """Two runs of a study.

    Args:
        cell: values of the axes in the second run's cell.
        difference: the second run's number minus the first one's.
        p_value: of this pair alone.
        adjusted: of all pairs of the call together (Holm).
        num_clusters: n, prompts (or separate batches, of times).
    """

    cell: Cell
    difference: Estimate
    p_value: float
    adjusted: float
    num_clusters: int


@dataclass(frozen=True, eq=False, repr=False)
class PairedTests(Tabular):
    """What `Study.test` found, a line for each pair of cells.

    Args:
        tests: in the order of the cells.
        of: the number that is compared.
        first: what the pairs' first cells have in common.
    """

    tests: list[PairedTest]
    of: str
    first: Cell

    def tables(self) -> list[Table]:
        """Differences with intervals, and both p-values."""
        axes = axes_of([test.cell for test in self.tests], least=2) or {"drafter": []}
        rows = [
            [
                *(called(name, test.cell.get(name)) for name in axes),
                f"{test.difference:+{FIGURES[self.of]}}",
                f"{test.p_value:.2g}",
                f"{test.adjusted:.2g}",
            ]
            for test in self.tests
        ]
        header = [*(name.replace("_", " ") for name in axes), "difference", "p", "p, Holm"]
        return [Table(header, rows, (self.note(),), labels=len(axes))]

    def records(self) -> list[dict[str, Any]]:
        """One per pair: the second cell, the difference with its interval, and both p-values."""
        return [
            {
                **test.cell,
                "difference": test.difference.value,
                "low": test.difference.low,
                "high": test.difference.high,
                "p_value": test.p_value,
                "adjusted": test.adjusted,
            }
            for test in self.tests
        ]

    def note(self) -> str:
        """What was tested, and how."""
        counts = sorted({test.num_clusters for test in self.tests})
        many = "-".join(map(str, counts[:: max(1, len(counts) - 1)]))
        swaps = "all" if counts[-1] <= MOST_EXACT else f"{NUM_DRAWN + 1:,} random".replace(",", " ")
        named = ", ".join(called(name, value) for name, value in self.first.items())
        is_time = self.of in ("ms_per_token", "tokens_per_second")
        units = "separate batches" if is_time else "prompts"
        least = len(self.tests) * 2 / 2 ** counts[-1]  # of an exact p-value, after Holm
        few = (
            f" So few {units} show no difference: after Holm no p is below {min(least, 1):.2g}."
            * (least > 0.05)
        )
        return (
            f"{self.of[0].upper()}{self.of[1:]}".replace("_", " ")
            + f" minus that of {named}; p by {swaps} label swaps within {many} {units}, two-sided; "
            f"Holm over {len(self.tests)} pairs.{few}"
        )


def swap_p_value(totals: ArrayLike, *, seed: int = 0) -> float:
    """How probable a difference as large as that of the two ratios is, if labels are arbitrary.

    The p-value is the share of label swaps within prompts whose difference is at least as large:
    of all 2^n swaps, up to 16 prompts, and else of 99 999 drawn ones and the observed labels.

    Args:
        totals: `[n, 2, 2]`, of each prompt and run, what is divided and by what.
        seed: of swaps that are drawn.

    Returns:
        Two-sided; 1 where a ratio is not known.

    Example:
        >>> totals = [[[i, 2.0], [i + 1.0, 2.0]] for i in range(6)]
        >>> swap_p_value(totals) == 2 / 2**6
        True

    Reference: Fisher, The Design of Experiments, 1935, section 21; Phipson and Smyth, Permutation
    p-values should never be zero, 2010 (drawn swaps count the observed labels).
    """
    totals = np.asarray(totals, dtype=np.float64)
    n, sums = len(totals), totals.sum(axis=0)
    values = ratio(sums)[:, 0]
    observed = values[1] - values[0]
    if not np.isfinite(observed):
        return 1.0
    least = abs(observed) - 1e-12 * np.abs(values).sum()  # swaps that are equal but for rounding
    moved = totals[:, 1] - totals[:, 0]
    count = tried = 0
    for swaps in _swaps(n, seed):
        shift = swaps @ moved  # [S, 2]: what the first run gains
        with np.errstate(divide="ignore", invalid="ignore"):
            difference = ratio(sums[1] - shift) - ratio(sums[0] + shift)
        count += int((~(np.abs(difference) < least)).sum())  # what is not known counts, too
        tried += len(swaps)
    return count / tried if n <= MOST_EXACT else (1 + count) / (1 + tried)


def _swaps(n: int, seed: int) -> Iterator[np.ndarray]:
    """Which prompts' labels are swapped, `[S, n]` at a time."""
    if n <= MOST_EXACT:
        for start in range(0, 2**n, _CHUNK):
            numbers = np.arange(start, min(start + _CHUNK, 2**n))
            yield ((numbers[:, None] >> np.arange(n)) & 1).astype(np.float64)
        return
    generator = np.random.default_rng(seed)
    for start in range(0, NUM_DRAWN, _CHUNK):
        size = min(_CHUNK, NUM_DRAWN - start)
        yield generator.integers(2, size=(size, n), dtype=np.int8).astype(np.float64)
