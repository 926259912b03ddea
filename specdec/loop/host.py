"""The host's side of a call: `Generation` steps it, `OutputCollector` collects what it writes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from specdec.arguments import check_integer
from specdec.loop.outcome import Outcome, PendingOutcome
from specdec.loop.state import Parts
from specdec.loop.step import Stepper
from specdec.loop.storage import Storage
from specdec.request.call import Request
from specdec.results import GenerationResult
from specdec.row_step import RowStep

if TYPE_CHECKING:
    from specdec.lab.trace import Trace


class Generation:
    """One call under way, as `SpeculativeGenerator.start` returns it, to be stepped by hand.

    Rows end on the device, at an end-of-sequence token or the length limit. Stopping criteria and
    stop strings are functions of the host, which `generate` and `stream` call; whoever steps by
    hand may end rows with `end_rows`.

    Args:
        owner: the generator that started it; no other may step it.
        request: what was asked for.
        storage: holds its tensors.
        stepper: takes its steps; may be set to one that wraps it and does not hold the generation,
            which gives its tensors back when nobody does.
        give_back: takes the storage for other calls, when the generation is closed or dropped.

    Attributes:
        state: its tensors. Where the batch was filled up to a bucket, inert rows follow its own.
        rows: which row of the batch each row of `state` is; all of them, until some are dropped.
        max_draft_tokens: the most that its steps may have drafted.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> tokenizer, target = zoo.load_tokenizer(), zoo.load_target()
        >>> generator = SpeculativeGenerator(target, "lookup")
        >>> inputs = tokenizer("def main():", return_tensors="pt")
        >>> generation = generator.start(**inputs, max_new_tokens=16)
        >>> while not generation.has_ended.all():
        ...     outcome = generator.step(generation)
        >>> rows = zip(generation.tokens, generation.lengths, strict=True)
        >>> texts = [tokenizer.decode(row[:length]) for row, length in rows]
        >>> texts[0].startswith("def main():")
        True
        >>> generation
        Generation(1 of 1 row ended; lengths [19], prompts included; K = 8)
    """

    def __init__(
        self,
        owner: object,
        request: Request,
        storage: Storage,
        stepper: Stepper,
        give_back: Callable[[Storage], None],
    ):
        self.owner, self.request, self.storage = owner, request, storage
        self.stepper = stepper
        self.state = storage.state
        self.rows = list(range(len(request.lengths)))
        asked = request.num_draft_tokens
        self._most = storage.state.signature.num_draft_tokens
        self._num_draft_tokens = self._most if asked is None else asked
        self.max_draft_tokens = self._num_draft_tokens
        self._giving_back = weakref.finalize(self, give_back, storage)
        self._giving_back.atexit = False

    def close(self) -> None:
        """Gives its tensors to later calls, as happens anyway when nobody holds the generation any
        more. From then on it must not be stepped, and what it shows may be another call's.
        """
        self._giving_back()

    def __repr__(self) -> str:
        """Waits for the device."""
        from specdec.loop.capturing import standing

        return standing(self)

    @property
    def parts(self) -> Parts:
        """Target, drafter and sampler."""
        return self.storage.parts

    @property
    def tokens(self) -> Tensor:
        """`[B, S]` committed tokens, each row's prompt (without its padding) first; what follows
        the row's `lengths` is garbage.
        """
        return self.state.buffer.tokens[: len(self.rows)]

    @property
    def lengths(self) -> Tensor:
        """`[B]` committed tokens of each row, those of the prompt included."""
        return self.state.buffer.root_position[: len(self.rows)] + 1

    @property
    def has_ended(self) -> Tensor:
        """`[B]` bool: rows that commit nothing any more."""
        return self.state.buffer.remaining[: len(self.rows)] == 0

    @property
    def num_draft_tokens(self) -> int:
        """How many tokens the next steps draft: what the call asked for, or K, at first. It may
        be set to any number up to K before any step; each value is captured once.

        Raises:
            TypeError, ValueError: when set to anything but an integer in 0..K.
        """
        return self._num_draft_tokens

    @num_draft_tokens.setter
    def num_draft_tokens(self, value: int) -> None:
        advice = "the drafter's own is the largest"
        check_integer("num_draft_tokens", value, 0, self._most, advice=advice)
        self._num_draft_tokens = value
        self.max_draft_tokens = max(self.max_draft_tokens, value)

    @torch.inference_mode()
    def run_step(self) -> Outcome:
        """One step for every row, by the generation's stepper; see `SpeculativeGenerator.step`.

        Raises:
            ValueError: the generation was closed.
        """
        if not self._giving_back.alive:
            raise ValueError(
                "this generation was closed, and its tensors are another call's; start a new one"
            )
        with self.state.narrowed(self.state.num_in_use):
            outcome = self.stepper(self.state, self._num_draft_tokens)
        if self.state.signature.batch_size > len(self.rows):
            outcome = outcome.of_rows(len(self.rows))
        return outcome

    def synchronize(self) -> None:
        """Waits for the device and reads the rows' lengths, so that the next steps attend over no
        more slots than they need. Worth it now and then for those who step by hand.
        """
        self.state.buffer.note_longest(int(self.lengths.max()))

    @torch.inference_mode()
    def end_rows(self, rows: list[int]) -> None:
        """Ends rows of the batch from outside a step, as a stopping criterion does."""
        here = [self.rows.index(row) for row in rows if row in self.rows]
        self.state.buffer.remaining[here] = 0

    @torch.inference_mode()
    def drop_ended(self) -> None:
        """Goes on with the rows that have not ended, in the same storage, so that steps cost less.

        Every outcome of the rows so far must have been read. The call waits for the device. With
        logits processors all rows stay: those may go by row numbers of the batch. Where steps are
        captured all rows stay too: those steps have one shape.
        """
        if self.request.processors or self.state.signature.is_captured:
            return
        is_live = [left > 0 for left in self.state.buffer.remaining.tolist()]
        if any(is_live) and not all(is_live):
            from specdec.graphs.rows import keep_rows, rows_to_keep

            rows = rows_to_keep(is_live)
            self.rows[:] = [self.rows[row] for row in rows]  # a tracer has the same list
            signature = self.state.signature._replace(batch_size=len(rows))
            self.state = replace(keep_rows(self.state, rows), signature=signature)


@dataclass(frozen=True, eq=False)
class StepRecord:
    """One step of a batch as `SpeculativeGenerator.stream` yields it.

    Args:
        index: number of the step, from 0.
        rows: per row what the step did, `None` for rows that had ended before.
    """

    index: int
    rows: list[RowStep | Any]  # not `None`: type checkers would ask for a check at each access


class OutputCollector:
    """Collects the tokens of every row of a generation and builds the result. No step waits for it.

    Attributes:
        generation, request: of the call.
        new_tokens: of each row.
        finish_reasons: of each row, as in the result; `None` while it goes on.
        steps: of each row.
        num_collected: steps that were taken over.
    """

    def __init__(self, generation: Generation, streamer: BaseStreamer | None = None):
        self.generation, self.request = generation, generation.request
        self._room = self.request.max_new_tokens
        self._lengths = list(self.request.lengths)
        rows = len(self._lengths)
        self.new_tokens: list[list[int]] = [[] for _ in range(rows)]
        self.finish_reasons: list[str | None] = [None if self._room > 0 else "length"] * rows
        self.steps: list[list[RowStep]] = [[] for _ in range(rows)]
        self._outputs: Any = None
        if self.request.outputs:
            from specdec.loop.outputs import OutputTables

            self._outputs = OutputTables(self.request.outputs, rows)
        self._faults: dict[int, str] = {}  # of rows that have one after their new tokens
        self.num_collected = 0
        self._ends: Any = None
        self._stream: Any = None
        if streamer is not None:
            from specdec.loop.columns import Stream

            self._stream = Stream(streamer)

    @property
    def is_done(self) -> bool:
        """Every row has ended."""
        return None not in self.finish_reasons

    @property
    def most_left(self) -> int:
        """Tokens that the row which is furthest from its length may still get, as far as outcomes
        have been read; 0 when all have ended.
        """
        pairs = zip(self.new_tokens, self.finish_reasons, strict=True)
        return max((self._room - len(new) for new, reason in pairs if reason is None), default=0)

    @property
    def longest(self) -> int:
        """Length of the longest row on the device, as far as outcomes have been read; rows that a
        stopping criterion cut count in full there, and rows that were dropped do not count.
        """
        return max(self._lengths[row] for row in self.generation.rows)

    def add(self, outcome: PendingOutcome) -> StepRecord:
        """Takes over one step.

        Raises:
            ValueError: a step found something wrong with its inputs, and no stopping criterion ends
                the row before it.
        """
        numbers = self.generation.rows
        records: list[RowStep | None] = [None] * len(self.new_tokens)
        steps = dict(zip(numbers, outcome.read(), strict=True))
        for number, step in sorted(steps.items()):
            self._lengths[number] += len(step.new_tokens)
            if self.finish_reasons[number] is not None or number in self._faults:
                continue
            if step.faults:
                step.cut(step.num_sound)
            tokens = step.new_tokens
            self.new_tokens[number] += tokens
            if step.faults:
                from specdec.loop.faults import text_of_step

                self._faults[number] = text_of_step(self, number, step, outcome)
            elif tokens and tokens[-1] in self.request.eos:
                self.finish_reasons[number] = "eos"
            elif len(self.new_tokens[number]) >= self._room:
                self.finish_reasons[number] = "length"
            if not tokens:
                continue
            records[number] = step
            self.steps[number].append(step)
            if self._outputs is not None:
                own = numbers.index(number), len(tokens)
                self._outputs.add(number, *own, outcome.outputs)
        if self.request.criteria or self._faults:
            self._end_rows()
        self.num_collected += 1
        if self._stream is not None:
            self._stream.hand_over(self)
        return StepRecord(self.num_collected - 1, records)

    def _end_rows(self) -> None:
        if self._ends is None:
            from specdec.loop.criteria import Ends

            self._ends = Ends(self.request)
        self._ends.find(self, self._faults)

    def result(
        self, trace: Trace | None = None, *, wall_s: float | None = None
    ) -> GenerationResult:
        """The finished generation, with its trace where there is one, and the seconds it took."""
        lengths = [len(new) for new in self.new_tokens]
        pad, prompts = self.request.pad, self.request.padded
        padded = [new + [pad] * (max(lengths) - len(new)) for new in self.new_tokens]
        new_tokens = torch.tensor(padded, dtype=torch.long, device=prompts.device)
        k, depth = self.generation.max_draft_tokens, self.generation.state.signature.tree_depth
        outputs = {}
        if self._outputs is not None:
            outputs = self._outputs.joined(self.steps, prompts.device)
        return GenerationResult(
            sequences=torch.cat([prompts.long(), new_tokens], dim=1),
            lengths=lengths,
            finish_reasons=list(self.finish_reasons),
            seeds=self.request.seeds,
            num_draft_tokens=k,
            depth=depth and min(depth, k),
            wall_s=wall_s,
            trace=trace,
            steps=[list(row) for row in self.steps],
            outputs=outputs,
            tokenizer=self.request.tokenizer,
            prompts=self.request.prompts,
            sampling=self.request.sampling,
            row_inputs=self.request.row_inputs,
        )
