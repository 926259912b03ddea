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

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from torch import Tensor
from typing_extensions import TypeVar

from specdec.arguments import check_integer, check_number
from specdec.types import depths_of


@dataclass(frozen=True, eq=False)
class RowStep:
    """One step of one row, as the host read it.

    Args:
        draft_tokens: what was proposed.
        num_accepted: how many of them the sampler accepted.
        new_tokens: what the row emitted: accepted tokens, then one recovered or bonus token, cut at
            its end.
        parents: the token that each one follows, see `Draft.parents`; `None` makes those of a
            chain.
        path: the tokens that were accepted, by their index; `None` makes the first ones.
        outputs: numbers of each new token by name, what the call keeps of them.
        faults: sum of the `Fault` values that were found in the step, 0 for none; `generate` raises
            them.
        num_sound: new tokens before the first fault, as the step was read; `None` for all of them.
    """

    draft_tokens: list[int]
    num_accepted: int
    new_tokens: list[int]
    parents: list[int] | None = None
    path: list[int] | None = None
    outputs: dict[str, list[float]] = field(default_factory=dict)
    faults: int = 0
    num_sound: int | None = None

    def __post_init__(self):
        if self.parents is None:
            object.__setattr__(self, "parents", _of_chain(len(self.draft_tokens)))
        if self.path is None:
            object.__setattr__(self, "path", list(range(self.num_accepted)))

    @property
    def logprobs(self) -> list[float] | Any:
        """With `output_logprobs`, of each new token as it was drawn; else `None`."""
        return self.outputs.get("logprobs")

    @property
    def raw_logprobs(self) -> list[float] | Any:
        """Likewise, by the softmax of the target's own logits."""
        return self.outputs.get("raw_logprobs")

    @property
    def is_chain(self) -> bool:
        """Each draft token follows the one before it."""
        return self.parents == _of_chain(len(self.draft_tokens))

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        return max(depths_of(self.parents))

    def children_of(self, node: int) -> list[int]:
        """The draft tokens that follow one, or -1 for the root."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    @property
    def rejected(self) -> list[int]:
        """The draft tokens that follow the last accepted one: where it has any, the emitted token
        stands in their place.
        """
        return self.children_of(self.path[-1] if self.num_accepted else -1)

    @property
    def kinds(self) -> list[str]:
        """`"accepted"`, `"recovered"` or `"bonus"` for each new token."""
        last = "recovered" if self.rejected else "bonus"
        kinds = ["accepted"] * self.num_accepted + [last]
        return kinds[: len(self.new_tokens)]

    def cut(self, count: int) -> None:
        """Drops all but the first new tokens, of a row that ends after them."""
        for values in (self.new_tokens, *self.outputs.values()):
            del values[count:]

    @classmethod
    def from_saved(cls, saved: list) -> RowStep:
        """The step whose fields a file holds, in their order."""
        drafted, accepted, new, *tree = saved
        parents, path = tree or (None, None)
        step = cls(drafted, accepted, new, parents, path)
        for token in [*drafted, *new]:
            check_integer("a token", token, 0)
        check_integer("num_accepted", accepted, 0, len(drafted))
        is_cut = 1 <= len(new) <= accepted + 1
        along = [drafted[node] for node in step.path]
        if not is_cut or new[:accepted] != along[: min(accepted, len(new))]:
            raise ValueError(
                f"new_tokens must be the {accepted} accepted tokens and one more, or a beginning "
                f"of these, got {new} after the draft {drafted}"
            )
        return step

    def saved(self) -> list:
        """Its fields for a file, those of a tree only where it is one."""
        fields = [self.draft_tokens, self.num_accepted, self.new_tokens, self.parents, self.path]
        return fields[: 3 if self.is_chain else 5]


def _of_chain(count: int) -> list[int]:
    """`RowStep.parents` of a chain."""
    return list(range(-1, count - 1))


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
_OUTPUTS = "scores", "logits", "logprobs", "raw_logprobs"
_NOT_PLAIN = "tokenizer", "trace"


TraceOrNone = TypeVar("TraceOrNone", default=Any)
"""A `Trace` where `generate` was told to keep one."""


@dataclass(frozen=True, eq=False)
class GenerationResult(Generic[TraceOrNone]):
    """The outcome of `SpeculativeGenerator.generate`.

    Args:
        sequences: `[B, T + M]` int64: the prompt exactly as passed, the new tokens, then padding;
            what HF `generate` returns.
        lengths: new tokens of each row.
        finish_reasons: per row `"eos"`, `"length"` or `"stop"` (a stopping criterion).
        seeds: per row the seed that was used, also when none was given; `None` for greedy
            generations.
        stats: counts and rates.
        trace: steps by row, with `generate(..., trace=True)`, which takes longer; else `None`. It
            is a `specdec.lab.trace.Trace`, which also holds the probabilities, draws, entropies and
            times of every step.
        steps: per row its steps (draft, accepted and new tokens), in every result, without
            `trace=True` too.
        origins: per row where each new token came from: `"accepted"`, `"recovered"` or `"bonus"`.
        outputs: by name what the call keeps of every new token, numbers as a float32 `[B, M]`, 0
            after a row's end, anything else as a tuple of `[B, ...]` for each column.
        tokenizer: of the target, where the call named it.
        prompts: ids of each row's prompt, without padding.
        sampling: what the tokens were drawn from (`specdec.request.Sampling`).
        row_inputs: `[B, ...]` by name, what the call brought for each row; adapters as numbers.

    Example:
        >>> import torch
        >>> from specdec import SpeculativeGenerator, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), "lookup")
        >>> result = generator.generate(torch.tensor([[5, 6]]), max_new_tokens=4)
        >>> result.sequences.shape, result.lengths, result.finish_reasons
        (torch.Size([1, 6]), [4], ['length'])
    """

    sequences: Tensor
    lengths: list[int]
    finish_reasons: list[str]
    seeds: list[int] | None
    stats: SpeculationStats
    # A type variable has no default value of its own.
    trace: TraceOrNone = None  # type: ignore[assignment]
    steps: list[list[RowStep]] = field(default_factory=list)
    origins: list[list[str]] = field(default_factory=list)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    prompts: list[list[int]] = field(default_factory=list)
    sampling: Any = None
    row_inputs: Mapping[str, Tensor] = field(default_factory=dict)

    # `Any`, so that type checkers believe a caller who reads what he has asked for.
    @property
    def scores(self) -> tuple[Tensor, ...] | Any:
        """With `output_scores`, for each column of new tokens the logits `[B, V]` that they were
        sampled from (after processors, temperature and truncation), NaN where a row has ended; else
        `None`.
        """
        return self.outputs.get("scores")

    @property
    def logits(self) -> tuple[Tensor, ...] | Any:
        """Likewise, with `output_logits`, as the target returned them."""
        return self.outputs.get("logits")

    @property
    def logprobs(self) -> Tensor | Any:
        """With `output_logprobs`, `[B, M]` float32: log-probabilities of the new tokens in the
        distribution that they were drawn from (the softmax of their `scores`), 0 after a row's end,
        so that a row's sum is that of its text; else `None`.
        """
        return self.outputs.get("logprobs")

    @property
    def raw_logprobs(self) -> Tensor | Any:
        """Likewise, in the model's own distribution (the softmax of their `logits`)."""
        return self.outputs.get("raw_logprobs")

    @property
    def new_tokens(self) -> Tensor:
        """`[B, M]` what follows the prompts in `sequences`."""
        return self.sequences[:, self.sequences.shape[1] - max(self.lengths, default=0) :]

    @property
    def texts(self) -> list[list[int]]:
        """Ids of each row's new tokens, up to its end."""
        rows = zip(self.new_tokens.tolist(), self.lengths, strict=True)
        return [ids[:length] for ids, length in rows]

    def pieces(self, row: int, tokenizer: Any = None) -> list[tuple[str, str]]:
        """The new text of a row in pieces, each with the origin of its first token.

        Args:
            row: of the batch.
            tokenizer: decodes the tokens; by default the call's own. Without any, pieces are ids.
        """
        from specdec.lab.show.text import pieces

        tokens = self.new_tokens[row, : self.lengths[row]].tolist()
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        return [(text, self.origins[row][first]) for text, first in pieces(tokenizer, tokens)]

    def to_dict(self) -> dict[str, Any]:
        """All but tokenizer and trace as tensors and plain values, by the names above, for
        `torch.save`; `torch.load(path, weights_only=True)` reads it.

        Example:
            >>> import torch
            >>> from specdec import SpeculativeGenerator, zoo
            >>> generator = SpeculativeGenerator(zoo.load_target(), "lookup")
            >>> result = generator.generate(torch.tensor([[5, 6]]), max_new_tokens=4)
            >>> result.to_dict()["stats"]["emitted"]
            [4]
        """
        plain = {name: value for name, value in vars(self).items() if name not in _NOT_PLAIN}
        plain["stats"] = self.stats.to_dict()
        plain["steps"] = [[step.saved() for step in row] for row in self.steps]
        plain["sampling"] = None if self.sampling is None else asdict(self.sampling)
        plain["row_inputs"] = dict(self.row_inputs)
        return {**dict.fromkeys(_OUTPUTS), **plain.pop("outputs"), **plain}

    if not TYPE_CHECKING:  # a type checker finds these faults itself

        def __getitem__(self, index):
            from specdec.lab.show.misuse import refuse_index

            refuse_index(index)

        def __len__(self):
            from specdec.lab.show.misuse import refuse_length

            refuse_length()

        def __bool__(self):
            return True

        def __getattr__(self, name):
            from specdec.lab.show.misuse import refuse_name

            refuse_name(self, name)

    def __repr__(self) -> str:
        from specdec.lab.show.texts import text_of

        return text_of(self)

    def _repr_html_(self) -> str:
        from specdec.lab.show.texts import html_of

        return html_of(self)


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
