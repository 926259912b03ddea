"""`Generation`: the host's side of one call."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from specdec.drafters.base import check_state
from specdec.kernels.verify.reference import find_draft_faults
from specdec.loop.contracts import fault_text
from specdec.loop.outcome import Outcome, StepScores
from specdec.loop.processors import process_step
from specdec.loop.runner import StepRunner
from specdec.loop.step import EditLogits, Mark
from specdec.request.call import Request
from specdec.samplers import Warp
from specdec.types import Draft, rows_to_keep


class Generation:
    """One call under way, as `SpeculativeGenerator.start` returns it, to be stepped by hand.

    Rows end on the device, at an end-of-sequence token or the length limit. Stopping criteria and
    stop strings are functions of the host, which `generate` and `stream` call; whoever steps by
    hand may end rows with `end_rows`.

    Args:
        owner: the generator that started it; no other may step it.
        request: what was asked for.
        runner: runs its steps over its tensors.
        give_back: takes the runner for other calls, when the generation is closed or dropped.

    Attributes:
        state: its tensors. Where the batch was filled up to a bucket, inert rows follow its own.
        rows: which row of the batch each row of `state` is; all of them, until some are dropped.
        ended_by_host: rows that were ended from outside a step.
        mark: takes the times of the parts of each step, where the call is traced.

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
        runner: StepRunner,
        give_back: Callable[[StepRunner], None],
    ):
        self.owner = owner
        self.request = request
        self.runner = runner
        self.whole = self.state = runner.state
        self.rows = list(range(len(request.prompts.lengths)))
        self.ended_by_host: list[int] = []
        asked = request.options.num_draft_tokens
        most = runner.state.signature.num_draft_tokens
        self._num_draft_tokens = most if asked is None else asked
        self.mark: Mark | None = None
        self._unprocessed: Tensor | None = None
        self._is_first = True
        self._giving_back = weakref.finalize(self, give_back, runner)
        self._giving_back.atexit = False

    def close(self) -> None:
        """Gives its tensors to later calls, as happens anyway when nobody holds the generation any
        more. From then on it must not be stepped, and what it shows may be another call's.
        """
        self._giving_back()

    def __repr__(self) -> str:
        """Waits for the device."""
        ended, rows = int(self.has_ended.sum()), len(self.request.prompts.lengths)
        ended += rows - len(self.rows)
        return (
            f"Generation({ended} of {rows} row{'s' * (rows != 1)} ended; lengths "
            f"{self.lengths.tolist()}, prompts included; K = {self.num_draft_tokens})"
        )

    @property
    def tokens(self) -> Tensor:
        """`[B, S]` committed tokens, each row's prompt (without its padding) first; what follows
        the row's `lengths` is garbage.
        """
        return self.state.buffer.tokens[: len(self.rows)]

    @property
    def lengths(self) -> Tensor:
        """`[B]` committed tokens of each row, those of the prompt included."""
        return self.state.buffer.lengths[: len(self.rows)] + 1

    @property
    def has_ended(self) -> Tensor:
        """`[B]` bool: rows that commit nothing any more."""
        return self.state.buffer.remaining[: len(self.rows)] == 0

    @property
    def num_draft_tokens(self) -> int:
        """How many tokens the next steps draft: what the call asked for, or K, at first. It may
        be set to any number up to K before any step; each value is captured once.

        Raises:
            ValueError: when set to anything but an integer in 0..K.
        """
        return self._num_draft_tokens

    @num_draft_tokens.setter
    def num_draft_tokens(self, value: int) -> None:
        most = self.whole.signature.num_draft_tokens
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise ValueError(
                f"num_draft_tokens must be an integer in 0..{most}, got {value!r}; {most} is the "
                "drafter's own"
            )
        self._num_draft_tokens = value

    @property
    def edit_logits(self) -> EditLogits | None:
        """The logits processors of the call, where it has any."""
        return self._process if self.request.options.processors else None

    def _process(self, draft: Draft, logits: Tensor) -> Tensor:
        self._unprocessed = logits
        return process_step(self.request, self.state.buffer, draft, logits)

    def scores_of(self, outcome: Outcome) -> StepScores | None:
        """Copies of the logits of the last step that the call wants to keep."""
        options, logits = self.request.options, outcome.logits
        if not (options.keeps_scores or options.keeps_logits):
            return None
        own = self._unprocessed if options.processors else logits
        return StepScores(
            scores=self._own_warp().scores(logits) if options.keeps_scores else None,
            logits=own.float().clone() if options.keeps_logits else None,
        )

    def _own_warp(self) -> Warp:
        """That of the batch's own rows, which come first; none of them moves."""
        return self.state.warp.keep(list(range(len(self.rows))))

    def run_step(self) -> Outcome:
        """One step for every row; see `SpeculativeGenerator.step`."""
        outcome = self.runner.run(
            self.state,
            num_draft_tokens=self.num_draft_tokens,
            edit_logits=self.edit_logits,
            mark=self.mark,
        )
        filled = self.state.signature.batch_size > len(self.rows)
        outcome = outcome.of_rows(len(self.rows)) if filled else outcome
        if self._is_first:
            self._check_probs(outcome)
        self._is_first = False
        return outcome

    def _check_probs(self, outcome: Outcome) -> None:
        """Raises `ValueError` for draft probabilities that cannot be right, where the sampler does
        not look at them; waits for the device, once in a call.
        """
        if outcome.verdict.faults is not None or outcome.draft.probs is None:
            return
        parts = self.runner.parts
        for row, faults in enumerate(find_draft_faults(outcome.draft).tolist()):
            if faults:
                text = fault_text(faults, parts.drafter, parts.sampler)
                raise ValueError(f"in row {row} of the first step {text}")

    def synchronize(self) -> None:
        """Waits for the device and reads the rows' lengths, so that the next steps attend over no
        more slots than they need. Worth it now and then for those who step by hand.
        """
        self.state.buffer.note_longest(int(self.lengths.max()))

    @torch.inference_mode()
    def end_rows(self, rows: list[int]) -> None:
        """Ends rows of the batch from outside a step, as a stopping criterion does."""
        self.ended_by_host += rows
        here = [self.rows.index(row) for row in rows if row in self.rows]
        self.state.buffer.remaining[here] = 0

    @torch.inference_mode()
    def drop_ended(self) -> None:
        """Goes on with the rows that have not ended, in the same storage, so that steps cost less.

        Every outcome of the rows so far must have been read. The call reads `remaining` and so
        waits for the device. With logits processors all rows stay: those may go by row numbers of
        the batch. Where steps are captured all rows stay too: those steps have one shape.
        """
        if self.request.options.processors or self.runner.captures:
            return
        rows = rows_to_keep([left > 0 for left in self.state.buffer.remaining.tolist()])
        if 0 < len(rows) < len(self.rows):
            self.rows = [self.rows[row] for row in rows]
            self.state = self.state.keep(rows)
            check_state(self.runner.parts.drafter, self.state.drafter_state, by="init_state().keep")
