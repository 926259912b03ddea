"""Counts and rates of generations, and the one definition of each.

Per step and row, `drafted` tokens were up for decision, `accepted` of them were kept by the sampler
(0..drafted), and one recovered or bonus token followed; `emitted` of these 1 + accepted tokens
remained after cutting at the end of the sequence or at the length limit.

- *acceptance length* = 1 + mean(accepted) over steps: the bonus or recovered token is counted,
  truncation is not.
- *acceptance rate* = accepted / drafted tokens.
- *joint rate at i* = steps that accepted drafts 1..i / steps.
- *conditional rate at i* = steps that accepted drafts 1..i / steps that accepted 1..i-1 and drafted
  an i-th.
- *block efficiency* = emitted tokens / target passes (steps), truncation counted.

So 1 + the sum of joint rates is the acceptance length, and where every step drafts K tokens the
product of the first i conditional rates is the joint rate at i.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from specdec.arguments import check_integer, check_number
from specdec.row_step import RowStep


class Totals(NamedTuple):
    """Counts over all rows, which `SpeculationStats` has for each row."""

    steps: int
    drafted: int
    accepted: int
    emitted: int


class SpeculationStats:
    """Counts of a generation, and every rate derived from them.

    `steps`, `drafted`, `accepted` and `emitted` have a number per row, `totals` their sums.
    Statistics of several generations add up (`a + b`, `sum(list_of_stats)`): their rows follow each
    other, positions that one of them does not have count nothing there, and times add.

    Args:
        steps: per row, the steps it took part in before its end.
        num_draft_tokens: K.
        depth: D, the number of positions that rates are given for; `None` for the longest path of
            the steps' trees, or K where they are chains.
        wall_s: seconds that the generation took, prompts included; `None` where nobody measured. It
            is no part of `to_dict`, so that equal runs have equal dictionaries.

    Raises:
        ValueError: a step that drafted more than K tokens, or accepted more than it drafted, or
            emitted more than these and one, so that rates would be wrong.

    Example:
        >>> row = [RowStep([1, 2], 1, [1, 9]), RowStep([3, 4], 2, [3, 4, 5])]
        >>> stats = SpeculationStats([row], num_draft_tokens=2)
        >>> stats.acceptance_length, stats.acceptance_rate, stats.block_efficiency
        (2.5, 0.75, 2.5)
        >>> stats.joint_rates, stats.conditional_rates
        ([1.0, 0.5], [1.0, 0.5])
        >>> stats + stats
        SpeculationStats(acceptance length 2.50, rate 0.75, 10 tokens in 4 steps of 2 rows, K = 2)
    """

    def __init__(
        self,
        steps: Sequence[Sequence[RowStep]],
        num_draft_tokens: int,
        *,
        depth: int | None = None,
        wall_s: float | None = None,
    ):
        check_integer("num_draft_tokens", num_draft_tokens, 0)
        if wall_s is not None:
            check_number("wall_s", wall_s, 0)
        _check_steps(steps, num_draft_tokens)
        self.num_draft_tokens = num_draft_tokens
        self.wall_s = wall_s
        self.steps: list[int] = [len(row) for row in steps]
        self.drafted: list[int] = [sum(len(s.draft_tokens) for s in row) for row in steps]
        self.accepted: list[int] = [sum(s.num_accepted for s in row) for row in steps]
        self.emitted: list[int] = [sum(len(s.new_tokens) for s in row) for row in steps]
        everything = [step for row in steps for step in row]
        if depth is None:
            is_chain = all(step.is_chain for step in everything)
            depth = num_draft_tokens if is_chain else max(step.depth for step in everything)
        self.depth = depth
        positions = range(self.depth)
        self.accepted_at: list[int] = [
            sum(s.num_accepted > i for s in everything) for i in positions
        ]
        """Steps, over all rows, that accepted the drafts up to and including each position.
        """
        reached = [s.num_accepted + bool(s.rejected) for s in everything]
        self.reached_at: list[int] = [sum(count > i for count in reached) for i in positions]
        """Steps that accepted everything before each position and drafted a token there."""

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        """The statistics of both, the rows of `other` after those of this one."""
        if not isinstance(other, SpeculationStats):
            return NotImplemented
        most = max(self.num_draft_tokens, other.num_draft_tokens)
        both = SpeculationStats([], most, depth=max(self.depth, other.depth))
        for name in _OF_ROWS:
            setattr(both, name, getattr(self, name) + getattr(other, name))
        for name in _OF_POSITIONS:
            counts = (getattr(self, name), getattr(other, name))
            setattr(both, name, [sum(pair) for pair in zip_longest(*counts, fillvalue=0)])
        if self.wall_s is not None and other.wall_s is not None:
            both.wall_s = self.wall_s + other.wall_s
        return both

    def __radd__(self, other: object) -> SpeculationStats:
        """For `sum`, which begins with 0."""
        return self if other == 0 else NotImplemented

    @property
    def totals(self) -> Totals:
        """Steps and tokens over all rows.

        Example:
            >>> rows = [[RowStep([1, 2], 1, [1, 9])], [RowStep([3, 4], 2, [3, 4, 5])]]
            >>> stats = SpeculationStats(rows, num_draft_tokens=2)
            >>> stats.steps, stats.totals
            ([1, 1], Totals(steps=2, drafted=4, accepted=3, emitted=5))
        """
        return Totals(*(sum(getattr(self, name)) for name in Totals._fields))

    @property
    def tokens_per_s(self) -> float | None:
        """Emitted tokens per second of `wall_s`; `None` where nobody measured."""
        return sum(self.emitted) / self.wall_s if self.wall_s else None

    @property
    def acceptance_length(self) -> float:
        """1 + mean accepted tokens per step."""
        return 1 + _ratio(sum(self.accepted), sum(self.steps))

    @property
    def accepted_per_step(self) -> float:
        """Mean accepted tokens per step: the acceptance length without the target's own token."""
        return _ratio(sum(self.accepted), sum(self.steps))

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens."""
        return _ratio(sum(self.accepted), sum(self.drafted))

    @property
    def block_efficiency(self) -> float:
        """Emitted tokens / target passes, truncation counted."""
        return _ratio(sum(self.emitted), sum(self.steps))

    @property
    def joint_rates(self) -> list[float]:
        """For each position, the share of steps that accepted every draft token up to it."""
        return [_ratio(count, sum(self.steps)) for count in self.accepted_at]

    @property
    def conditional_rates(self) -> list[float]:
        """For each position, the share accepted among the steps that reached it."""
        return [_ratio(a, r) for a, r in zip(self.accepted_at, self.reached_at, strict=True)]

    def to_dict(self) -> dict:
        """Counts and rates as plain Python values."""
        names = ("num_draft_tokens", *_OF_ROWS, *_OF_POSITIONS, *_RATES)
        return {name: getattr(self, name) for name in names}

    def to_frame(self):
        """A pandas frame with one line per draft position."""
        from specdec.lab.show.statistics import frame_of_positions

        return frame_of_positions(self)

    def to_frame_of_rows(self):
        """A pandas frame with one line per row of the batch (per prompt), in their order."""
        from specdec.lab.show.statistics import frame_of_rows

        return frame_of_rows(self, _OF_ROWS)

    def __repr__(self) -> str:
        from specdec.lab.show.statistics import line_of

        return line_of(self)

    def __str__(self) -> str:
        from specdec.lab.show.statistics import text_of

        return text_of(self)

    def _repr_html_(self) -> str:
        from specdec.lab.show.statistics import html_of

        return html_of(self)


_OF_ROWS = Totals._fields
_OF_POSITIONS = ("accepted_at", "reached_at")
_RATES = (
    *("acceptance_length", "acceptance_rate", "block_efficiency"),
    *("joint_rates", "conditional_rates"),
)


def _check_steps(steps: Sequence[Sequence[RowStep]], num_draft_tokens: int) -> None:
    for row, own in enumerate(steps):
        for number, step in enumerate(own):
            drafted, accepted, new = len(step.draft_tokens), step.num_accepted, len(step.new_tokens)
            if not accepted <= drafted <= num_draft_tokens or new > accepted + 1:
                raise ValueError(
                    f"row {row}, step {number} drafted {drafted}, accepted {accepted} and emitted "
                    f"{new} tokens; expected at most K = {num_draft_tokens} drafted, at most these "
                    "accepted, and at most one more emitted"
                )


def _ratio(count: int, total: int) -> float:
    return count / total if total else 0.0
