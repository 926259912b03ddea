"""What a generation returns, and the one definition of every number in it.

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

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowStep:
    """One step of one row, as the host read it.

    Args:
        draft_tokens: what was proposed.
        num_accepted: how many of them the sampler accepted.
        new_tokens: what the row emitted: accepted tokens, then one recovered or bonus token, cut at
            its end.
    """

    draft_tokens: list[int]
    num_accepted: int
    new_tokens: list[int]

    @property
    def kinds(self) -> list[str]:
        """`"accepted"`, `"recovered"` or `"bonus"` for each new token."""
        last = "bonus" if self.num_accepted == len(self.draft_tokens) else "recovered"
        kinds = ["accepted"] * self.num_accepted + [last]
        return kinds[: len(self.new_tokens)]


class SpeculationStats:
    """Counts of a generation, and every rate derived from them.

    Args:
        steps: per row, the steps it took part in before its end.
        num_draft_tokens: K.

    Example:
        >>> row = [RowStep([1, 2], 1, [1, 9]), RowStep([3, 4], 2, [3, 4, 5])]
        >>> stats = SpeculationStats([row], num_draft_tokens=2)
        >>> stats.acceptance_length, stats.acceptance_rate, stats.block_efficiency
        (2.5, 0.75, 2.5)
        >>> stats.joint_rates, stats.conditional_rates
        ([1.0, 0.5], [1.0, 0.5])
    """

    def __init__(self, steps: list[list[RowStep]], num_draft_tokens: int):
        self.num_draft_tokens = num_draft_tokens
        self.steps: list[int] = [len(row) for row in steps]
        self.drafted: list[int] = [sum(len(s.draft_tokens) for s in row) for row in steps]
        self.accepted: list[int] = [sum(s.num_accepted for s in row) for row in steps]
        self.emitted: list[int] = [sum(len(s.new_tokens) for s in row) for row in steps]
        everything = [step for row in steps for step in row]
        positions = range(num_draft_tokens)
        self.accepted_at: list[int] = [
            sum(s.num_accepted > i for s in everything) for i in positions
        ]
        """Steps, over all rows, that accepted the drafts up to and including each position.
        """
        self.reached_at: list[int] = [
            sum(s.num_accepted >= i and len(s.draft_tokens) > i for s in everything)
            for i in positions
        ]
        """Steps that accepted everything before each position and drafted a token there."""

    @property
    def acceptance_length(self) -> float:
        """1 + mean accepted tokens per step."""
        return 1 + _ratio(sum(self.accepted), sum(self.steps))

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
        return {
            "num_draft_tokens": self.num_draft_tokens,
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "accepted_at": self.accepted_at,
            "reached_at": self.reached_at,
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "block_efficiency": self.block_efficiency,
            "joint_rates": self.joint_rates,
            "conditional_rates": self.conditional_rates,
        }

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict())

    def to_frame(self):
        """A pandas frame with one line per draft position.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_frame() needs pandas: pip install pandas") from error
        return pd.DataFrame(
            {
                "reached": self.reached_at,
                "accepted": self.accepted_at,
                "conditional_rate": self.conditional_rates,
                "joint_rate": self.joint_rates,
            },
            index=pd.RangeIndex(1, self.num_draft_tokens + 1, name="position"),
        )

    def __str__(self) -> str:
        lines = [
            f"acceptance length {self.acceptance_length:.2f}   acceptance rate "
            f"{self.acceptance_rate:.2f}   "
            f"block efficiency {self.block_efficiency:.2f}   ({sum(self.emitted)} tokens, "
            f"{sum(self.steps)} steps)"
        ]
        if self.num_draft_tokens:
            lines.append("position  reached  accepted  conditional  joint")
        for i, (conditional, joint) in enumerate(
            zip(self.conditional_rates, self.joint_rates, strict=True)
        ):
            reached, accepted = self.reached_at[i], self.accepted_at[i]
            lines.append(
                f"{i + 1:>8}  {reached:>7}  {accepted:>8}  {conditional:>11.2f}  {joint:>5.2f}"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td>{i + 1}</td><td>{self.reached_at[i]}</td><td>{self.accepted_at[i]}</td>"
            f"<td>{self.conditional_rates[i]:.2f}</td><td>{self.joint_rates[i]:.2f}</td></tr>"
            for i in range(self.num_draft_tokens)
        )
        head = "".join(
            f"<th>{h}</th>" for h in ("position", "reached", "accepted", "conditional", "joint")
        )
        return (
            f"<p>acceptance length <b>{self.acceptance_length:.2f}</b>, rate "
            f"{self.acceptance_rate:.2f}, "
            f"block efficiency {self.block_efficiency:.2f}</p><table><tr>{head}</tr>{cells}</table>"
        )


@dataclass(frozen=True, eq=False)
class GenerationResult:
    """The outcome of `SpeculativeGenerator.generate`.

    Args:
        sequences: `[B, T + M]` int64: the prompt exactly as passed, the new tokens, then padding;
            what HF `generate` returns.
        lengths: new tokens of each row.
        finish_reasons: per row `"eos"`, `"length"` or `"stop"` (a stopping criterion).
        seeds: per row the seed that was used, also when none was given; `None` for greedy
            generations.
        stats: counts and rates.
        trace: per row its steps, when asked for; else `None`. It is a `specdec.trace.Trace`, which
            also holds the probabilities, draws, entropies and times of every step.
        steps: per row its steps, in every result.
    """

    sequences: Tensor
    lengths: list[int]
    finish_reasons: list[str]
    seeds: list[int] | None
    stats: SpeculationStats
    trace: Sequence[list[RowStep]] | None = None
    steps: list[list[RowStep]] = field(default_factory=list)

    @property
    def new_tokens(self) -> Tensor:
        """`[B, M]` what follows the prompts in `sequences`."""
        return self.sequences[:, self.sequences.shape[1] - max(self.lengths, default=0) :]


def _ratio(count: int, total: int) -> float:
    return count / total if total else 0.0
