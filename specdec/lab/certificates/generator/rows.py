"""Whether rows repeat: the same prompts with the same seeds give the same drafts and texts again,
alone and in company, with prompts read in other chunks, and after other rows have ended.

A lossless sampler hides what a drafter does wrong here: the text keeps its distribution and its
greedy form, and only the speed or the reproducibility suffers. So drafted tokens are compared, too.

The same call again has the same shapes, so nothing may differ. Other calls compute the same numbers
in other shapes, and so with other rounding. The first difference of a row is rounding where the
step's probabilities agree within `sqrt(eps)` and, for a draft token, where the step's own noise
draws the token of each call from them, for an emitted one where the rule decides so on the row's
numbers alone. The draft of a head without probabilities cannot be judged
like this: one such row is excused, two are not; in half precision none is judged.

Legend: R rows, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import Tensor

from specdec.generator import SpeculativeGenerator
from specdec.graphs.rows import map_tensors
from specdec.lab.certificates.generator.reading import inputs_of
from specdec.loop.host import Generation, OutputCollector
from specdec.loop.outcome import Outcome
from specdec.request import Sampling
from specdec.request.lists import left_padded
from specdec.row_step import RowStep
from specdec.samplers import LogitsFilter, Stream

FEWEST_ROWS, MOST_ROWS = 4, 8
"""Prompts beyond are left out; fewer are filled up with beginnings of the first one."""
_ENDED_AFTER = 2  # steps, half of the rows end

ADVICE = {
    "again": (
        "random numbers that are not the step's (draw through Proposal, or with "
        "drawing.noise.uniform(Stream.PROPOSE)), and at memory of earlier requests "
        "(has_memory = True declares it)"
    ),
    "alone": "values of one row that reach others, and tokens beyond num_new that are read",
    "in other chunks": "prefill: context.start, and rows whose num_new is 0 or -1",
    "after rows have ended": (
        "what goes by the number of a row: rows stand elsewhere then, and of a drafter only the "
        "tensors of its state have moved, without those that are shared()"
    ),
    "over used storage": (
        "what is left of the texts before: of a drafter only the tensors of its state are zeros "
        "again, without those that are shared()"
    ),
}
"""What is compared with one call for all rows, and what to look at where it differs."""
EXACT = "again", "over used storage"
"""Ways in which all shapes are the same, so that no difference is rounding."""


@dataclass(frozen=True)
class RowDifference:
    """The first difference of a row between two calls."""

    way: str  # of generating, a key of `ADVICE`
    row: int
    step: int
    expected: RowStep | None  # `None`: there is no such step
    found: RowStep | None
    is_rounding: bool | None = False  # `None` without probabilities to decide by

    @property
    def is_of_draft(self) -> bool:
        """The drafts differ, not only what was emitted after them."""
        drafted, found = (getattr(s, "draft_tokens", None) for s in (self.expected, self.found))
        return drafted != found

    def __str__(self) -> str:
        what, name = ("drafted", "draft_tokens") if self.is_of_draft else ("emitted", "new_tokens")
        expected, found = (getattr(s, name, None) for s in (self.expected, self.found))
        verdict = f"look at {ADVICE[self.way] if self.is_of_draft else 'sampler and target'}"
        return (
            f"{self.way}: row {self.row}, step {self.step} {what} {found}, not {expected}; "
            f"{'rounding' if self.is_rounding else verdict}"
        )


@dataclass(frozen=True)
class RowsAudit:
    """The drafts and texts of the same rows, generated in several ways. Where not even the same
    call repeats, no other way is tried.
    """

    num_rows: int
    num_steps: int  # that were compared, over all ways
    differences: list[RowDifference]  # the first of each row and way

    @property
    def passed(self) -> bool:
        """Every difference is rounding."""
        return all(difference.is_rounding for difference in self.differences)

    @property
    def ways(self) -> list[str]:
        """In which the rows differ, by more than rounding."""
        bad = [difference.way for difference in self.differences if not difference.is_rounding]
        return list(dict.fromkeys(bad))

    def __str__(self) -> str:
        repeat = "drafts and texts repeat " if self.passed else ""
        head = f"rows: {self.num_rows} rows, {self.num_steps} steps: {repeat}{', '.join(ADVICE)}"
        if not self.passed:
            head = f"rows: {self.num_rows} rows differ {', '.join(self.ways)}"
        first = {d.way: d for d in reversed(self.differences)}  # one line for each way
        return "\n          ".join([head, *map(str, reversed(first.values()))])


def audit_rows(
    generator: SpeculativeGenerator,
    prompts: list[list[int]],
    num: int,
    sampling: Sampling,
    row_inputs: Mapping[str, Any] | None = None,
) -> RowsAudit:
    """Generates `num` tokens of the same rows in the ways of `ADVICE` and compares every draft and
    token. The numbers of the rows are their seeds. All steps draft K tokens: a draft length that is
    chosen depends on what all rows of the batch accepted.
    """
    rows, half = prompts[:MOST_ROWS], max(1, len(prompts[0]) // 2)
    beginnings = [prompts[0][:length] for length in (1, half, None)]
    beginnings = beginnings[: max(0, FEWEST_ROWS - len(rows))]
    if (row_inputs or {}).get("prompt"):  # which cannot be cut anywhere
        beginnings = []
    # A beginning has the row inputs of its prompt.
    own = inputs_of(row_inputs, [*range(len(rows)), *[0] * len(beginnings)])
    rows += beginnings
    judge, k = _Judge(generator, sampling), generator.drafter.num_draft_tokens
    options = {"max_new_tokens": num, "num_draft_tokens": k, **sampling.options()}
    together = _Call(generator, rows, list(range(len(rows))), options, row_inputs=own)
    again, eager, way = replace(together), together.elsewhere(), "again"
    if together.varies(again):  # draws, or what the storage held: fresh storage decides
        fresh = together.elsewhere(), together.elsewhere()
        way = "again" if fresh[0].varies(fresh[1]) else "over used storage"
    judge.compare(way, together, again)
    if judge.differences:  # no other way would repeat
        return judge.audit(len(rows))

    alone = [replace(eager, numbers=[row]) for row in together.numbers]
    for one in alone:
        judge.compare("alone", together, one, together.num_full)
    if not judge.differences:  # rows that differ alone would differ again
        leaving = replace(eager, ends_half=True)
        for row, one in enumerate(alone):
            count = len(leaving.steps[row]) if row < len(alone) // 2 else None
            judge.compare("after rows have ended", one, leaving, count)

    longest = max(map(len, rows))
    size = max(1, -(-(longest - 1) // 3))  # about three chunks, or one
    chunks = {"prefill_chunk_size": longest if size == generator.prefill_chunk_size else size}
    judge.compare("in other chunks", together, together.elsewhere(**chunks), together.num_full)

    before = together.elsewhere(kept_bytes=None)
    between, after = replace(before, numbers=together.numbers[::-1]), replace(before)
    assert before.steps
    assert between.steps
    judge.compare("over used storage", before, after)
    return judge.audit(len(rows))


@dataclass(frozen=True, eq=False)
class _Call:
    """One call: which of the rows, in which order, by which generator. With `ends_half` the first
    half of the batch is ended from outside after some steps.
    """

    generator: SpeculativeGenerator
    rows: list[list[int]]
    numbers: list[int]
    options: dict
    ends_half: bool = False
    row_inputs: dict | None = None

    @cached_property
    def steps(self) -> dict[int, list[RowStep]]:
        """By row. The call is made when they are asked for first."""
        if self.ends_half:
            *_, (_, result, _) = self.walk()
        else:
            result = self.generator.generate(*self._inputs(), **self._options)
        return dict(zip(self.numbers, result.steps, strict=True))

    @property
    def num_full(self) -> int:
        """Steps before a row has ended: until then `keep` is not used, so what differs there is
        none of its faults.
        """
        return min(map(len, self.steps.values()))

    def varies(self, other: _Call) -> bool:
        """Whether another call of the same rows has other steps."""
        return any(_first_difference(self.steps[row], other.steps[row]) for row in self.numbers)

    def elsewhere(self, **settings) -> _Call:
        """The same call by the same parts in storage of their own. Steps are eager: there rows
        leave the batch.
        """
        own = self.generator
        settings = {"prefill_chunk_size": own.prefill_chunk_size, "kept_bytes": 0} | settings
        parts = own.target, own.drafter, own.sampler
        return replace(self, generator=SpeculativeGenerator(*parts, graphs=False, **settings))

    def walk(self) -> Iterator[tuple[Generation, OutputCollector, Outcome]]:
        """Step by step; the last one is yielded once more, when its outcome has been read."""
        generation = self.generator.start(*self._inputs(), **self._options)
        collector, index = OutputCollector(generation), 0
        while not collector.is_done:
            outcome = self.generator.step(generation)
            yield generation, collector, outcome
            collector.add(outcome.fetch())
            index += 1
            if self.ends_half and index == _ENDED_AFTER:
                for row in range(len(self.numbers) // 2):
                    generation.end_rows([row])
                    collector.finish_reasons[row] = "stop"
            generation.drop_ended()
        yield generation, collector, outcome

    @torch.inference_mode()
    def view(
        self, row: int, step: int, logits_filter: LogitsFilter
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Generates once more up to a step. Returns a row's probabilities there, `[K, V]` of the
        draft, or `None`, and `[K + 1, V]` of the target; and its uniforms `[K + 1]` of the draft.
        """
        generation, _, outcome = next(islice(self.walk(), step, None))
        here, state = generation.rows.index(self.numbers.index(row)), generation.state
        noise = state.noise.at(state.buffer.start, outcome.logits.shape[1])
        draft, target = (
            outcome.draft.probs,
            logits_filter(outcome.logits[here : here + 1])[0].double(),
        )
        draft = None if draft is None else draft[here].double().clone()
        return draft, target, noise.uniform(Stream.PROPOSE)[here]

    @torch.inference_mode()
    def is_decided_alone(self, row: int, step: int, logits_filter: LogitsFilter) -> bool:
        """Whether the rule, given what it had for a row in a step and nothing else, emits what it
        emitted there beside other rows. The inputs are the same numbers, so nothing is rounding.
        """
        generation, _, outcome = next(islice(self.walk(), step, None))
        here, state = generation.rows.index(self.numbers.index(row)), generation.state
        draft = map_tensors(lambda each: each[here : here + 1].clone(), outcome.draft)
        logits = outcome.logits[here : here + 1].clone()
        source = type(state.noise)([row], device=logits.device)
        noise = source.at(state.buffer.start[here : here + 1], logits.shape[1])
        verdict = self.generator.sampler(draft, logits, logits_filter, noise)
        emitted = self.steps[row][step].new_tokens
        return emitted == verdict.tokens[0, : len(emitted)].tolist()

    @property
    def _options(self) -> dict:
        own = inputs_of(self.row_inputs, self.numbers)
        return {**self.options, "seed": self.numbers, "row_inputs": own}

    def _inputs(self) -> tuple[Tensor, Tensor]:
        return left_padded([self.rows[row] for row in self.numbers], self.generator.target.device)


class _Judge:
    """Collects the differences between calls, and classifies each as rounding or a fault."""

    def __init__(self, generator: SpeculativeGenerator, sampling: Sampling):
        drafter = generator.drafter
        tensors = [*drafter.parameters(), *drafter.buffers()]
        dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
        # What only counts and compares ids has no rounding.
        self._drafts_round = bool(dtypes or drafter.feature_layers)
        eps = max(torch.finfo(dtype).eps for dtype in (generator.target.dtype, *dtypes))
        self._is_half, self._tolerance = eps > torch.finfo(torch.float32).eps, eps**0.5
        self._logits_filter = LogitsFilter(
            1, device=generator.target.device, **sampling.logits_filter
        )
        self._num_steps = 0
        self.differences: list[RowDifference] = []

    def compare(self, way: str, one: _Call, other: _Call, count: int | None = None) -> None:
        """Takes down the first difference of the rows of both calls in their first `count` steps;
        none is rounding in a way of `EXACT`.
        """
        for row in [row for row in other.numbers if row in one.numbers]:
            steps = one.steps[row][:count], other.steps[row][:count]
            self._num_steps += len(steps[1])
            if (first := _first_difference(*steps)) is None:
                continue
            difference = RowDifference(way, row, *first)
            if way not in EXACT and None not in first:
                is_rounding = self._is_rounding(difference, one, other)
                difference = replace(difference, is_rounding=is_rounding)
            self.differences.append(difference)

    def audit(self, num_rows: int) -> RowsAudit:
        """What was found. A draft without probabilities that differs in one row only is excused."""
        unjudged = Counter(d.way for d in self.differences if d.is_rounding is None)
        excused = {way for way, count in unjudged.items() if count == 1 or self._is_half}
        differences = [
            replace(d, is_rounding=d.way in excused) if d.is_rounding is None else d
            for d in self.differences
        ]
        return RowsAudit(num_rows, self._num_steps, differences)

    def _is_rounding(self, difference: RowDifference, *calls: _Call) -> bool | None:
        """Whether rounding explains a difference: distributions agree in total variation, and each
        draft token is the one that its uniform draws; `None` without draft probabilities.
        """
        views = [call.view(difference.row, difference.step, self._logits_filter) for call in calls]
        of_draft, probs, uniforms = zip(*views, strict=True)
        if difference.is_of_draft:
            drafts = difference.expected.draft_tokens, difference.found.draft_tokens
            if len(drafts[0]) != len(drafts[1]):
                return False
            if any(each is None for each in of_draft):
                return None if self._drafts_round else False
            index = next(i for i, (a, b) in enumerate(zip(*drafts, strict=True)) if a != b)
            probs = [each[index] for each in of_draft]
            for row, draft, u in zip(probs, drafts, uniforms, strict=True):
                end = row[: draft[index] + 1].sum()
                start = end - row[draft[index]]
                if not start - self._tolerance <= u[index] <= end + self._tolerance:
                    return False
        elif not self._logits_filter.is_greedy:
            place = difference.row, difference.step, self._logits_filter
            if not all(call.is_decided_alone(*place) for call in calls):
                return False
        return bool(((probs[0] - probs[1]).abs().sum(dim=-1) / 2 <= self._tolerance).all())


def _first_difference(
    expected: list[RowStep], found: list[RowStep]
) -> tuple[int, RowStep | None, RowStep | None] | None:
    """The number of the first step that differs, and both; `None` for one that is not there."""
    pairs = enumerate(zip_longest(expected, found))
    return next(((i, a, b) for i, (a, b) in pairs if None in (a, b) or vars(a) != vars(b)), None)
