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
from html import escape
from itertools import zip_longest
from typing import Any

from torch import Tensor

from specdec.arguments import check_integer, check_number
from specdec.printable import printable


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

    @classmethod
    def from_saved(cls, saved: list) -> RowStep:
        """The step whose fields a file holds, in their order.

        Raises:
            ValueError: these are no fields of a step.
        """
        if not isinstance(saved, list) or len(saved) != 3:
            raise ValueError(f"a step must be 3 fields, got {str(saved)[:60]}")
        drafted, accepted, new = saved
        for name, tokens in (("draft_tokens", drafted), ("new_tokens", new)):
            is_ids = isinstance(tokens, list) and all(type(t) is int and t >= 0 for t in tokens)
            if not is_ids:
                raise ValueError(f"{name} must be a list of ids, got {str(tokens)[:60]}")
        check_integer("num_accepted", accepted, 0, len(drafted))
        if (
            not 1 <= len(new) <= accepted + 1
            or new[:accepted] != drafted[: min(accepted, len(new))]
        ):
            raise ValueError(
                f"new_tokens must be the {accepted} accepted tokens and one more, or a beginning "
                f"of these, got {new} after the draft {drafted}"
            )
        return cls(drafted, accepted, new)


class SpeculationStats:
    """Counts of a generation, and every rate derived from them.

    Statistics of several generations add up (`a + b`, `sum(list_of_stats)`): their rows follow each
    other, positions that one of them does not have count nothing there, and times add.

    Args:
        steps: per row, the steps it took part in before its end.
        num_draft_tokens: K.
        wall_s: seconds that the generation took, prompts included; `None` where nobody measured. It
            is no part of `to_dict`, so that equal runs have equal dictionaries.

    Raises:
        TypeError: `steps` is no list of rows of `RowStep`.
        ValueError: a step that drafted more than K tokens, or accepted more than it drafted, or
            emitted more than these and one.

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
        self, steps: list[list[RowStep]], num_draft_tokens: int, *, wall_s: float | None = None
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

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        """The statistics of both, the rows of `other` after those of this one."""
        if not isinstance(other, SpeculationStats):
            return NotImplemented
        most = max(self.num_draft_tokens, other.num_draft_tokens)
        both = SpeculationStats([], most)
        for name in ("steps", "drafted", "accepted", "emitted"):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        for name in ("accepted_at", "reached_at"):
            counts = (getattr(self, name), getattr(other, name))
            setattr(both, name, [sum(pair) for pair in zip_longest(*counts, fillvalue=0)])
        if self.wall_s is not None and other.wall_s is not None:
            both.wall_s = self.wall_s + other.wall_s
        return both

    def __radd__(self, other: object) -> SpeculationStats:
        """For `sum`, which begins with 0."""
        return self if other == 0 else NotImplemented

    @property
    def tokens_per_s(self) -> float | None:
        """Emitted tokens per second of `wall_s`; `None` where nobody measured."""
        return sum(self.emitted) / self.wall_s if self.wall_s else None

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
        pd = _pandas()
        return pd.DataFrame(
            {
                "reached": self.reached_at,
                "accepted": self.accepted_at,
                "conditional_rate": self.conditional_rates,
                "joint_rate": self.joint_rates,
            },
            index=pd.RangeIndex(1, self.num_draft_tokens + 1, name="position"),
        )

    def to_frame_of_rows(self):
        """A pandas frame with one line per row of the batch (per prompt), in their order.

        Raises:
            ImportError: pandas is not installed.
        """
        pd = _pandas()
        counts = {n: getattr(self, n) for n in ("steps", "drafted", "accepted", "emitted")}
        frame = pd.DataFrame(counts, index=pd.RangeIndex(len(self.steps), name="row"))
        steps = frame.steps.where(frame.steps > 0)  # 0 / 0 is no rate
        frame["acceptance_length"] = 1 + frame.accepted / steps
        frame["acceptance_rate"] = frame.accepted / frame.drafted.where(frame.drafted > 0)
        frame["block_efficiency"] = frame.emitted / steps
        return frame

    def __repr__(self) -> str:
        return (
            f"SpeculationStats(acceptance length {self.acceptance_length:.2f}, rate "
            f"{self.acceptance_rate:.2f}, {sum(self.emitted)} tokens in {sum(self.steps)} steps of "
            f"{len(self.steps)} rows, K = {self.num_draft_tokens}"
            + (f", {self.wall_s:.2f} s)" if self.wall_s is not None else ")")
        )

    def __str__(self) -> str:
        time = ""
        if self.tokens_per_s is not None:
            time = f", {self.wall_s:.2f} s, {self.tokens_per_s:.1f} tokens/s"
        lines = [
            f"acceptance length {self.acceptance_length:.2f}   acceptance rate "
            f"{self.acceptance_rate:.2f}   block efficiency {self.block_efficiency:.2f}",
            f"{sum(self.emitted)} tokens, {sum(self.steps)} steps{time}",
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
        trace: steps by row, with `trace=True`; else `None`. It is a `specdec.trace.Trace`, which
            also holds the probabilities, draws, entropies and times of every step.
        steps: per row its steps, in every result.
        origins: per row where each new token came from: `"accepted"`, `"recovered"` or `"bonus"`.
        scores: with `output_scores`, for each column of new tokens the logits `[B, V]` that they
            were sampled from (after processors, temperature and truncation), NaN where a row has
            ended; else `None`.
        logits: likewise, with `output_logits`, as the target returned them.
        tokenizer: of the target, where the call named it.
    """

    sequences: Tensor
    lengths: list[int]
    finish_reasons: list[str]
    seeds: list[int] | None
    stats: SpeculationStats
    trace: Sequence[list[RowStep]] | None = None
    steps: list[list[RowStep]] = field(default_factory=list)
    origins: list[list[str]] = field(default_factory=list)
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    tokenizer: Any = None

    @property
    def new_tokens(self) -> Tensor:
        """`[B, M]` what follows the prompts in `sequences`."""
        return self.sequences[:, self.sequences.shape[1] - max(self.lengths, default=0) :]

    def pieces(self, row: int, tokenizer: Any = None) -> list[tuple[str, str]]:
        """The new text of a row in pieces, each with the origin of its first token.

        Args:
            row: of the batch.
            tokenizer: decodes the tokens; by default the call's own. Without any, pieces are ids.
        """
        tokens = self.new_tokens[row, : self.lengths[row]].tolist()
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        if tokenizer is None:
            return [(f"{t} ", origin) for t, origin in zip(tokens, self.origins[row], strict=True)]
        return text_pieces(tokenizer, tokens, self.origins[row])

    def __repr__(self) -> str:
        count = len(self.lengths)
        lines = [f"GenerationResult of {count} row{'s' * (count != 1)}; {self.stats!r}"]
        lines.append("tokens: accepted  [recovered]  <bonus>")
        for row in range(min(count, _SHOWN_ROWS)):
            gap = " " if self.tokenizer is None else ""  # ids: the space is no part of a token
            texts = ((visible(text).removesuffix(gap), kind) for text, kind in self.pieces(row))
            marked = gap.join(_MARKERS[kind].format(text) for text, kind in texts)
            lines.append(f"{self._title(row)}: {marked}")
        return "\n".join(lines + ["..."] * (count > _SHOWN_ROWS))

    def _repr_html_(self) -> str:
        key = " ".join(token_span(kind, kind) for kind in _BACKGROUNDS)
        parts = [f"<div>tokens: {key}</div>"]
        for row in range(min(len(self.lengths), _SHOWN_ROWS)):
            spans = "".join(token_span(visible(text), kind) for text, kind in self.pieces(row))
            parts.append(f'<p>{self._title(row)}</p><pre style="{PRE_STYLE}">{spans}</pre>')
        return "".join([*parts, self.stats._repr_html_()])

    def _title(self, row: int) -> str:
        seed = f", seed {self.seeds[row]}" if self.seeds else ""
        return f"row {row} ({self.lengths[row]} tokens, {self.finish_reasons[row]}{seed})"


_SHOWN_ROWS = 8
_MARKERS = {"accepted": "{}", "recovered": "[{}]", "bonus": "<{}>"}
_BACKGROUNDS = {"accepted": "#bfe8bf", "recovered": "#f6c1c1", "bonus": "#bcd4f6"}
_UNDERLINES = {
    "accepted": "",
    "recovered": "border-bottom:2px solid #b42318;",
    "bonus": "border-bottom:2px dotted #1f5fbf;",
}
PRE_STYLE = "white-space:pre-wrap;line-height:1.7;margin:.5em 0"
"""Of the element around token spans; long lines are wrapped."""
END_OF_LINE = '<span style="opacity:.45;user-select:none">\u21b5</span><br>'
"""A visible mark, which is not copied with the text."""


def token_span(text: str, kind: str, *, background: str | None = None, title: str = "") -> str:
    """HTML of one token, readable on light and dark pages; kinds also differ by an underline, for
    readers who do not see the colours.

    Args:
        text: of the token; ends of lines get a mark.
        kind: `"accepted"`, `"recovered"` or `"bonus"`.
        background: colour in place of the kind's own.
        title: shown under the pointer; the kind by default.

    Example:
        >>> token_span("a < b", "accepted").endswith('title="accepted">a &lt; b</span>')
        True
    """
    shown = escape(text).replace("\n", END_OF_LINE)
    # A token of nothing but spaces would have no area to point at.
    shown = shown if text.strip(" ") else shown.replace(" ", "&nbsp;") or "&nbsp;"
    # Room below, where some fonts draw the underscore; room beside, so that tokens stand apart.
    style = f"color:#111;border-radius:2px;padding:1px 0 3px;margin-right:1px;{_UNDERLINES[kind]}"
    colour = _BACKGROUNDS[kind] if background is None else background
    return (
        f'<span style="{style}background:{colour}" title="{escape(title or kind)}">{shown}</span>'
    )


def _check_steps(steps: Sequence[Sequence[RowStep]], num_draft_tokens: int) -> None:
    """Refuses counts that would make rates above 1."""
    if not isinstance(steps, Sequence) or isinstance(steps, str):
        raise TypeError(f"steps must be a list of rows of RowStep, got {type(steps).__name__}")
    for row, own in enumerate(steps):
        for number, step in enumerate(own):
            if not isinstance(step, RowStep):
                raise TypeError(
                    f"steps must be a list of rows of RowStep, got a {type(step).__name__} in row "
                    f"{row}"
                )
            drafted, accepted, new = step.draft_tokens, step.num_accepted, step.new_tokens
            if not accepted <= len(drafted) <= num_draft_tokens or len(new) > accepted + 1:
                raise ValueError(
                    f"row {row}, step {number} drafted {len(drafted)}, accepted {accepted} and "
                    f"emitted {len(new)} tokens; expected at most K = {num_draft_tokens} drafted, "
                    "at most these accepted, and at most one more emitted"
                )


def visible(text: str) -> str:
    r"""Text with control characters, but for ends of lines and tabs, as their escapes: a terminal
    would obey them.

    Example:
        >>> visible("a\x1b[2J\n")
        'a\\x1b[2J\n'
    """
    return printable(text, keep="\n\t")


def pieces(tokenizer: Any, tokens: list[int]) -> list[tuple[str, int]]:
    """The text of tokens, in pieces that are whole characters; all pieces together are the decoded
    text.

    Args:
        tokenizer: decodes; `None` gives ids.
        tokens: of one row.

    Returns:
        Text, and the index of the first token that it belongs to. A token that only begins a
        character is shown with the token that completes it.
    """
    if tokenizer is None:
        return [(f"{token} ", index) for index, token in enumerate(tokens)]
    found, shown, first = [], "", None
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end], clean_up_tokenization_spaces=False)
        first = end - 1 if first is None else first
        if text.endswith("\ufffd") and end < len(tokens):
            continue  # a character that further tokens complete
        found.append((text[len(shown) :], first))
        shown, first = text, None
    return found


def text_pieces(tokenizer: Any, tokens: list[int], origins: list[str]) -> list[tuple[str, str]]:
    """As `pieces`, each with the origin of its first token; there is one origin per token."""
    return [(text, origins[first]) for text, first in pieces(tokenizer, tokens)]


def _pandas():
    try:
        import pandas
    except ImportError as error:
        raise ImportError("frames need pandas: pip install pandas") from error
    return pandas


def _ratio(count: int, total: int) -> float:
    return count / total if total else 0.0
